"""A model of transformers on the meta device from its configuration alone, and a batch of the right shapes for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn

from hf_zero.checkpoint.format import parse_json
from hf_zero.errors import ConfigError

DEFAULT_LENGTH = 1024
_LABELS_PER_TOKEN = (
    "ForCausalLM",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "LMHeadModel",
    "ForTokenClassification",
)


def read_config(path: Path) -> Any:
    """The configuration in a model folder or a config.json, or of a name on the Hub whose config.json is cached here.

    Nothing is downloaded. Raises ConfigError with one line for what is none of them.
    """
    if path.is_dir():
        file = path / "config.json"
    else:
        file = path if path.exists() else _cached_config(path)
    if not file.is_file():
        raise ConfigError(f"{path} is no model folder: config.json is missing")
    try:
        data = parse_json(file.read_bytes())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} is no model configuration: {error}") from error
    kind = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{file} is no model configuration: it has no model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"{file}: this transformers ({transformers.__version__}) does not know model_type {kind!r}")
    return transformers.CONFIG_MAPPING[kind].from_dict(data)


def _cached_config(name: Path) -> Path:
    try:
        cached = try_to_load_from_cache(str(name), "config.json")
    except HFValidationError:  # it is no name of the Hub
        raise ConfigError(f"{name}: no such file or folder") from None
    if not isinstance(cached, str):
        raise ConfigError(
            f"{name}: no such file or folder, and the cache of the Hub ({constants.HF_HUB_CACHE}) has no config.json "
            "of a model of that name. Nothing is downloaded here: give a folder or a config.json, or run first "
            f"`hf download {name} config.json`"
        )
    return Path(cached)


def build(config: Any, *, gradient_checkpointing: bool = False) -> nn.Module:
    """The model of `config` on the meta device, in training mode: its first architecture, else a language model.

    Raises ConfigError where the class cannot be built from the configuration.
    """
    names = [name for name in getattr(config, "architectures", None) or [] if hasattr(transformers, name)]
    try:
        with torch.device("meta"):
            if names:
                model = getattr(transformers, names[0])._from_config(config, dtype=config.dtype or torch.float32)
            elif type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
                model = transformers.AutoModelForCausalLM.from_config(config)
            else:
                model = transformers.AutoModel.from_config(config)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{type(config).__name__} does not build: {type(error).__name__}: {reason}") from error
    if gradient_checkpointing:
        _checkpoint(model)
    made: nn.Module = model.train()
    return made


def _checkpoint(model: Any) -> None:
    model.config.use_cache = False  # or transformers says that it turns the cache off
    model.activation_checkpointing_enable()


def can_checkpoint(model: Any) -> bool:
    """Whether `model` knows activation checkpointing, and does not use it yet."""
    return bool(model.supports_gradient_checkpointing and not model.is_activation_checkpointing)


@contextlib.contextmanager
def checkpointed(model: Any) -> Iterator[None]:
    """Inside, a layer of `model` keeps its inputs and computes the rest again."""
    _checkpoint(model)
    try:
        yield
    finally:
        model.activation_checkpointing_disable()


def default_length(config: Any) -> int:
    """Return the tokens of a sequence: what the model's positions allow, at most 1024."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions"):
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0:
            return min(limit, DEFAULT_LENGTH)
    return DEFAULT_LENGTH


def make_batch(model: Any, batch_size: int, length: int) -> dict[str, torch.Tensor]:
    """Inputs and labels on the meta device. Raises ConfigError for a model whose inputs are not known here."""
    config, name = model.config, type(model).__name__
    with torch.device("meta"):
        tokens = torch.zeros(batch_size, length, dtype=torch.long)
        if model.main_input_name == "input_ids":
            inputs = {"input_ids": tokens}
        elif model.main_input_name == "pixel_values":
            size = config.image_size
            sides = (size, size) if isinstance(size, int) else tuple(size)
            inputs = {"pixel_values": torch.zeros(batch_size, config.num_channels, *sides)}
        else:
            raise ConfigError(f"the inputs of {name} are not known here: {model.main_input_name}")
        per_row = torch.zeros(batch_size, dtype=torch.long)
        if name.endswith(("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")):
            inputs["labels"] = per_row
        elif name.endswith("ForQuestionAnswering"):
            inputs |= {"start_positions": per_row, "end_positions": per_row}
        elif name.endswith(_LABELS_PER_TOKEN):
            inputs["labels"] = tokens
        elif config.is_encoder_decoder:
            inputs["decoder_input_ids"] = tokens
    return inputs
