"""Tiny models of transformers, of many kinds, at stages 2 and 3 on two ranks beside torch in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks
from tests.harness.sharded import mean_over_ranks
from tests.hf.architectures import ARCHITECTURES

VOCAB, ROWS, LENGTH, STEPS, STAGES = 50, 2, 8, 3, (2, 3)
Inputs = Callable[[torch.Generator], dict[str, torch.Tensor]]


# -------------------------------------------------------------------- inputs
def _tokens(random: torch.Generator) -> torch.Tensor:
    return torch.randint(6, VOCAB - 18, (ROWS, LENGTH), generator=random)


def _words(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(random), "labels": _tokens(random)}


def _classes(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(random), "labels": torch.randint(2, (ROWS,), generator=random)}


def _image(random: torch.Generator, size: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, size, size, generator=random)}


def _pictures(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_image(random), "labels": torch.randint(2, (ROWS,), generator=random)}


def _maps(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_image(random, 32), "labels": torch.randint(2, (ROWS, 32, 32), generator=random)}


def _pairs(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(random), **_image(random), "return_loss": torch.tensor(True)}


def _captions(random: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = _tokens(random)
    tokens[:, :4] = 5  # the places of the four patches
    return {"input_ids": tokens, **_image(random), "labels": tokens}


def _sounds(random: torch.Generator) -> dict[str, torch.Tensor]:
    labels = torch.randint(1, 20, (ROWS, 4), generator=random)
    return {"input_values": torch.randn(ROWS, 400, generator=random), "labels": labels}


def _spoken(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 40, generator=random), "labels": _tokens(random)}


def _frames(random: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(ROWS, 24, 16, generator=random), "labels": torch.tensor([0, 1])}


# -------------------------------------------------------------------- models
# The names of the sizes differ: a configuration takes those that it knows.
_NAMES = {
    VOCAB: "vocab_size",
    16: "hidden_size d_model n_embd dim",
    24: "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner hidden_dim max_position_embeddings "
    "n_positions",
    2: "num_hidden_layers encoder_layers decoder_layers num_layers n_layer n_layers num_attention_heads num_heads "
    "n_head n_heads encoder_attention_heads decoder_attention_heads eos_token_id",
    1: "bos_token_id decoder_start_token_id",
    0: "pad_token_id",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_PATCHES = {"image_size": 16, "patch_size": 8}
_EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 1}
_CONVOLVED = {
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}


@dataclasses.dataclass(frozen=True)
class Row:
    make: Callable[[], nn.Module]
    inputs: Inputs


def _row(model: str, inputs: Inputs = _words, **more: Any) -> Row:
    """A class of transformers, built from its configuration class with small sizes."""

    def make() -> nn.Module:
        made: Any = getattr(transformers, model)
        configuration = made.config_class
        known = configuration().to_dict()
        return made(configuration(**{name: value for name, value in _SIZES.items() if name in known} | more))

    return Row(make, inputs)


def _of(name: str, inputs: Inputs = _words) -> Row:
    """A model that the tests of loading have."""
    return Row(ARCHITECTURES[name].make, inputs)


MODELS: dict[str, Row] = {
    # decoders
    "llama, tied": _of("llama tied"),
    "llama": _of("llama untied"),
    "gpt2": _of("gpt2"),
    "gpt neox": _of("gpt neox"),
    "gemma2": _of("gemma2"),
    "opt": _of("opt"),
    "mistral": _row("MistralForCausalLM", num_key_value_heads=1),
    "qwen2": _row("Qwen2ForCausalLM", num_key_value_heads=1),
    "qwen3": _row("Qwen3ForCausalLM", num_key_value_heads=1, head_dim=8),
    "phi": _row("PhiForCausalLM"),
    "phi3": _row("Phi3ForCausalLM"),
    "falcon": _row("FalconForCausalLM"),
    "bloom": _row("BloomForCausalLM"),
    "gpt-j": _row("GPTJForCausalLM", rotary_dim=4),
    "cohere": _row("CohereForCausalLM"),
    "olmo2": _row("Olmo2ForCausalLM"),
    # experts, all of which are parts of one parameter
    "mixtral": _of("mixtral"),
    "qwen3 moe": _of("qwen3 moe"),
    "olmoe": _row("OlmoeForCausalLM", **_EXPERTS, num_experts=4),
    "gpt-oss": _row("GptOssForCausalLM", **_EXPERTS, num_local_experts=4, head_dim=8),
    # state spaces
    "mamba": _row("MambaForCausalLM", state_size=4),
    "mamba2": _row("Mamba2ForCausalLM", state_size=4, head_dim=8, num_heads=4, n_groups=1, chunk_size=4),
    "rwkv": _row("RwkvForCausalLM", attention_hidden_size=16),
    "jamba": _row(
        "JambaForCausalLM",
        num_experts=2,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    # encoders
    "bert": _row("BertForMaskedLM"),
    "roberta": _row("RobertaForSequenceClassification", _classes),
    "distilbert": _row("DistilBertForSequenceClassification", _classes),
    "electra": _row("ElectraForTokenClassification", lambda random: {**_words(random), "labels": _tokens(random) % 2}),
    "deberta v2": _row("DebertaV2ForSequenceClassification", _classes),
    "albert": _row("AlbertForMaskedLM", embedding_size=8),
    "modernbert": _row("ModernBertForMaskedLM"),
    # encoders with decoders
    "t5": _row("T5ForConditionalGeneration", d_kv=8, decoder_start_token_id=1),
    "bart": _of("bart"),
    "mt5": _row("MT5ForConditionalGeneration", d_kv=8),
    "pegasus": _row("PegasusForConditionalGeneration"),
    "led": _row("LEDForConditionalGeneration", attention_window=4),
    # vision
    "vit": _row("ViTForImageClassification", _pictures, **_PATCHES),
    "swin": _row(
        "SwinForImageClassification",
        _pictures,
        image_size=16,
        patch_size=2,
        window_size=2,
        depths=[1, 1],
        num_heads=[2, 2],
        embed_dim=8,
    ),
    "convnext": _row("ConvNextForImageClassification", _pictures, hidden_sizes=[8, 12], depths=[1, 1], num_stages=2),
    "resnet": _row("ResNetForImageClassification", _pictures, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1]),
    "segformer": _row(
        "SegformerForSemanticSegmentation",
        _maps,
        decoder_hidden_size=16,
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        hidden_sizes=[8, 16],
        depths=[1, 1],
        sr_ratios=[2, 1],
        strides=[4, 2],
        patch_sizes=[7, 3],
        mlp_ratios=[2, 2],
    ),
    "dinov2": _row("Dinov2ForImageClassification", _pictures, **_PATCHES),
    # speech
    "wav2vec2": _of("wav2vec2", _sounds),
    "hubert": _row("HubertForCTC", _sounds, **_CONVOLVED),
    "whisper": _of("whisper", _spoken),
    "audio spectrogram": _row("ASTForAudioClassification", _frames, patch_size=8, num_mel_bins=16, max_length=24),
    # several at once
    "clip": _of("clip", _pairs),
    "siglip": _of("siglip", _pairs),
    "llava": _of("llava", _captions),
}


def build(name: str) -> nn.Module:
    """Build a model without random numbers in the forward: ranks would draw others than one process does. The weights
    are larger than transformers makes them, so that attention, too, has gradients that are no rounding noise.
    """
    torch.manual_seed(0)
    model = MODELS[name].make()
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for key, value in vars(holder).items() if holder is not None else ():
                if isinstance(value, float) and ("drop" in key or key in ("p", "mask_time_prob")):
                    setattr(holder, key, 0.0)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(3)
    return model.train()


def inputs(name: str, step: int, rank: int) -> dict[str, torch.Tensor]:
    return MODELS[name].inputs(torch.Generator().manual_seed(10 * step + rank))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Adam makes full steps of gradients that are rounding noise; a larger epsilon keeps noise from mattering.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)


# -------------------------------------------------------------------- runs
@dataclasses.dataclass
class Outcome:
    losses: list[float]
    weights: dict[str, torch.Tensor]


def in_one_process(name: str) -> Outcome:
    """The ranks' batches one after the other: what normalises over a batch or counts its tokens sees a rank's."""
    model = build(name)
    start = {key: param.detach().clone() for key, param in model.named_parameters()}
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        both = [model(**inputs(name, step, rank)).loss / 2 for rank in range(2)]
        for loss in both:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in both))
    weights = {key: param.detach() for key, param in model.named_parameters()}
    still = [key for key, value in weights.items() if (value - start[key]).abs().max() < 1e-4]
    assert len(still) < 0.3 * len(weights), f"vacuous: {still} did not move"
    assert len(set(losses)) == STEPS and all(value.isfinite().all() for value in weights.values()), losses
    return Outcome(losses, weights)


def in_shards(name: str) -> list[Outcome]:
    """Return on every rank of a job: one outcome for each stage."""
    found = []
    for stage in STAGES:
        model = build(name)
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.0}
        engine = hf_zero.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
        losses = []
        for step in range(STEPS):
            loss = engine(**inputs(name, step, dist.get_rank())).loss
            engine.backward(loss)
            engine.step()
            losses.append(mean_over_ranks(loss.item()))
        found.append(Outcome(losses, engine.full_state_dict(keep=True)))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_like_one_process(name: str) -> None:
    want = in_one_process(name)
    for outcomes in run_ranks(in_shards, 2, name, timeout=120):
        for stage, got in zip(STAGES, outcomes, strict=True):
            assert got.losses == pytest.approx(want.losses, rel=1e-5), f"{name}, stage {stage}"
            for key, value in want.weights.items():
                label = f"{name}, stage {stage}: {key}"
                torch.testing.assert_close(
                    got.weights[key], value, rtol=1e-5, atol=2e-6, msg=lambda text, label=label: f"{label}: {text}"
                )
