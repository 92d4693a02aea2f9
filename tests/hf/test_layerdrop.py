"""LayerDrop at stage 3: a line says that it has no effect, or how it ends."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    HubertConfig,
    HubertForSequenceClassification,
    PreTrainedModel,
)

import hf_zero
from hf_zero.errors import DivergenceError
from hf_zero.hf.models.install import layerdrop_lines
from tests.harness.ranks import RankFailure, run_ranks


def hubert(rate: float) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    config = HubertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        mask_time_prob=0.0,
        layerdrop=rate,
    )
    return HubertForSequenceClassification(config), {
        "input_values": torch.randn(2, 400),
        "labels": torch.tensor([0, 1]),
    }


def bart(rate: float) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    config = BartConfig(
        vocab_size=64,
        d_model=16,
        encoder_layers=6,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        encoder_layerdrop=rate,
    )
    tokens = torch.randint(3, 64, (2, 8))
    return BartForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


MODELS = {"hubert": hubert, "bart": bart}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(name: str, rate: float, stage: int) -> list[str]:
    lines = Lines()
    logging.getLogger("hf_zero").addHandler(lines)
    torch.manual_seed(0)
    model, inputs = MODELS[name](rate)
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "train_micro_batch_size_per_gpu": 2,
        "desync_timeout": 10,
    }
    engine = hf_zero.initialize(model=model, config=config)[0]
    torch.manual_seed(5 + engine.rank)
    for _ in range(4):
        engine.backward(engine(**inputs).loss)
        engine.step()
    return [text for text in lines.texts if "layerdrop" in text]


@pytest.mark.parametrize(("rate", "stage"), [(0.5, 3), (0.0, 3), (0.5, 2)])
def test_models_whose_layers_all_run(rate: float, stage: int) -> None:
    first, other = run_ranks(train, 2, "hubert", rate, stage)
    assert other == []
    if rate and stage == 3:
        assert first == [
            "HubertForSequenceClassification: layerdrop=0.5 has no effect at stage 3: transformers runs every layer "
            "where parameters are sharded. Set it to 0, or use stage 2."
        ]
    else:
        assert first == []


def test_models_whose_ranks_would_differ() -> None:
    for outcome in run_ranks(train, 2, "bart", 0.5, 3, expect_error=True):
        assert isinstance(outcome, RankFailure) and isinstance(outcome.exception, DivergenceError)
        assert "LayerDrop" in outcome.message


def test_one_line_for_a_model_whose_parts_share_its_configuration() -> None:
    (line,) = layerdrop_lines(bart(0.5)[0])
    assert line.startswith("BartForConditionalGeneration: encoder_layerdrop=0.5 ends in a DivergenceError")
