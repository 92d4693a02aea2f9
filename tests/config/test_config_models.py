"""The width behind bucket sizes of "auto", for composite configurations of transformers and any other module."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_zero.config import ZeroConfig

SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
AUTO = {"zero_optimization": {"stage": 3, **dict.fromkeys(SIZES, "auto")}}
BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40, "vocab_size": 50}
TEXT = {"model_type": "llama", "hidden_size": 88, "num_attention_heads": 2, "intermediate_size": 40}

# Configurations that transformers' own rule finds a width in, and that width.
BY_CONFIG: dict[str, tuple[Callable[[], Any], int]] = {
    "llama": (lambda: transformers.LlamaConfig(hidden_size=96), 96),
    "gpt2 (n_embd)": (lambda: transformers.GPT2Config(n_embd=48), 48),
    "t5 (d_model)": (lambda: transformers.T5Config(d_model=32), 32),
    "bart (d_model)": (lambda: transformers.BartConfig(d_model=24), 24),
    "whisper (d_model)": (lambda: transformers.WhisperConfig(d_model=64), 64),
    "bloom (n_embed)": (lambda: transformers.BloomConfig(hidden_size=72), 72),
    "segformer (list)": (lambda: transformers.SegformerConfig(hidden_sizes=[16, 80, 24]), 80),
    "resnet (list)": (lambda: transformers.ResNetConfig(hidden_sizes=[16, 40]), 40),
    "clip (text_config)": (lambda: transformers.CLIPConfig(text_config={"hidden_size": 40}), 40),
    "llava (text_config)": (lambda: transformers.LlavaConfig(text_config=TEXT), 88),
    "qwen2-vl (text_config)": (lambda: transformers.Qwen2VLConfig(text_config={"hidden_size": 56}), 56),
    "gemma3 (text_config)": (lambda: transformers.Gemma3Config(text_config={"hidden_size": 104}), 104),
}


def their_rule(config: Any) -> int | None:
    """transformers' search, as its documentation has it."""
    for holder in (config, getattr(config, "text_config", None)):
        if hasattr(holder, "hidden_size"):
            return int(holder.hidden_size)
        if hasattr(holder, "hidden_sizes"):
            return max(holder.hidden_sizes)
    return None


def resolved(model: Any) -> tuple[dict[str, int], set[str]]:
    config = ZeroConfig.load(AUTO).resolve(model=model)
    paths = [f"zero_optimization.{name}" for name in SIZES]
    values = {name: config.settings[path] for name, path in zip(SIZES, paths, strict=True)}
    return values, {config.origins[path] for path in paths}


def sizes(width: int) -> dict[str, int]:
    return dict(zip(SIZES, (width * width, int(0.9 * width * width), 10 * width), strict=True))


@pytest.mark.parametrize("name", BY_CONFIG)
def test_a_configuration_gives_the_width_that_transformers_takes(name: str) -> None:
    make, width = BY_CONFIG[name]
    config = make()
    assert their_rule(config) == width, "vacuous: transformers finds another width"
    # The parameters would say something else.
    model = SimpleNamespace(config=config, parameters=lambda: iter([torch.empty(5, 7)]))
    assert resolved(model) == (sizes(width), {"auto"})


def encoder_decoder() -> nn.Module:
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**BERT), transformers.BertConfig(**BERT)
    )
    return transformers.EncoderDecoderModel(config)


def vision_encoder_decoder() -> nn.Module:
    vision = transformers.ViTConfig(
        **{key: value for key, value in BERT.items() if key != "vocab_size"}, image_size=8, patch_size=4
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        vision, transformers.BertConfig(**BERT)
    )
    return transformers.VisionEncoderDecoderModel(config)


class Odd(nn.Module):
    """A configuration that says the width as nothing and as text: neither is one."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=None, hidden_sizes=["64"], text_config=None)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))


# Modules without a width in a configuration, which transformers refuses: the commonest width of their matrices.
BY_PARAMETERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "encoder-decoder": (encoder_decoder, 32),
    "vision encoder-decoder": (vision_encoder_decoder, 32),
    "perceptron": (lambda: nn.Sequential(nn.Linear(12, 28), nn.Linear(28, 28), nn.Linear(28, 3)), 28),
    "transformer": (lambda: nn.TransformerEncoderLayer(24, 2, 24), 24),
    "recurrent": (lambda: nn.LSTM(16, 16), 16),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.Conv2d(32, 32, 3)), 32),
    "embedding": (lambda: nn.Embedding(1000, 44), 44),
    "odd configuration": (Odd, 20),
    "on meta": (lambda: nn.Linear(36, 5, device="meta"), 36),
}


@pytest.mark.parametrize("name", BY_PARAMETERS)
def test_without_a_width_in_the_configuration_the_parameters_give_one(name: str) -> None:
    make, width = BY_PARAMETERS[name]
    model = make()
    assert not isinstance(their_rule(getattr(model, "config", None)) if name != "odd configuration" else None, int)
    assert resolved(model) == (sizes(width), {"auto (from parameters)"})


def test_below_stage_3_the_keys_of_stage_3_take_their_defaults() -> None:
    config = ZeroConfig.load({"zero_optimization": {**AUTO["zero_optimization"], "stage": 2}})
    settings = config.resolve(model=nn.Linear(10, 10))
    assert settings.zero.reduce_bucket_size == 100
    assert settings.zero.stage3_prefetch_bucket_size == 50_000_000
    assert settings.origins["zero_optimization.stage3_prefetch_bucket_size"] == "auto (default)"
