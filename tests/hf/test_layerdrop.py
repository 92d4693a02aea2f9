"""LayerDrop at stage 3: each rank leaves out layers of its own, and has the losses that it has without sharding."""

from __future__ import annotations

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
from tests.harness.ranks import run_ranks


def hubert() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    config = HubertConfig(
        hidden_size=16,
        num_hidden_layers=4,
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
        layerdrop=0.5,
    )
    return HubertForSequenceClassification(config), {
        "input_values": torch.randn(2, 400),
        "labels": torch.tensor([0, 1]),
    }


def bart() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
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
        encoder_layerdrop=0.5,
    )
    tokens = torch.randint(3, 64, (2, 8))
    return BartForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


MODELS = {"hubert": hubert, "bart": bart}


def train(name: str, stage: int) -> tuple[list[float], list[int]]:
    """The losses of a rank, and how many modules ran in each step."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "train_micro_batch_size_per_gpu": 2,
        "desync_timeout": 10,
    }
    engine = hf_zero.initialize(model=model, config=config)[0]
    ran = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: ran.append(1))
    torch.manual_seed(5 + engine.rank)
    losses, counts = [], []
    for _ in range(4):
        ran.clear()
        loss = engine(**inputs).loss
        counts.append(len(ran))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, counts


@pytest.mark.parametrize("name", MODELS)
def test_ranks_leave_out_layers_of_their_own(name: str) -> None:
    whole, sharded = (run_ranks(train, 2, name, stage) for stage in (1, 3))
    counts = [counts for _, counts in sharded]
    assert counts == [counts for _, counts in whole] and counts[0] != counts[1]
    for (losses, _), (expected, _) in zip(sharded, whole, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != losses[-1]
