"""Restores Hugging Face weight folders by the names that live parameters have.

`save_pretrained` may rename and reshape on the way out (GPT-NeoX's `lm_head` becomes `embed_out`, experts are taken
apart), and `load_state_dict` knows nothing of it. So a folder is read back through the model's own conversions, every
tensor when it is needed, and a parameter that the folder does not restore is an error.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_zero.checkpoint.format import parse_json
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import CheckpointError
from hf_zero.hf.models.name_matching import match_stored
from hf_zero.hf.models.peft import adapter_files, adapter_tensors, is_peft_model, live_state
from hf_zero.hf.models.stored import StoredTensor, open_files


class LiveTensors(Mapping[str, torch.Tensor]):
    """Stored tensors under the names of a model's state dict, converted as `from_pretrained` would convert them."""

    def __init__(self, model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
        self._model = model
        self._stored = stored
        # Live name -> stored name and None, or the group that is converted and the name that the conversion gives.
        self._sources: dict[str, tuple[str, str | None]] = {}
        self._groups: dict[str, list[tuple[str, str]]] = {}  # first live name -> (pattern, stored name) of its sources
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        conversions = conversions_of(model)
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._converters = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        live = live_state(model)
        for name, (target, pattern) in match_stored(model, stored, conversions, live).items():
            if target in live and pattern is None:
                self._sources[target] = name, None
            elif target in live and pattern is not None:
                self._groups.setdefault(target, []).append((pattern, name))
        for first in self._groups:
            for name in self._convert(first, meta=True):
                self._sources.setdefault(name, (first, name))
        self._add_tied_names(live)

    def _add_tied_names(self, live: Mapping[str, torch.Tensor]) -> None:
        """A tied parameter is stored under one of its names; it is restored under all of them."""
        source_of = {id(live[name]): source for name, source in reversed(self._sources.items()) if name in live}
        for name, tensor in live.items():
            if id(tensor) in source_of:
                self._sources.setdefault(name, source_of[id(tensor)])

    def _convert(self, first: str, *, meta: bool = False) -> dict[str, torch.Tensor]:
        """Run one conversion. With `meta`, on tensors without data, to learn the names it makes."""
        sources = self._groups[first]
        converter = copy.deepcopy(self._converters[sources[0][0]])
        for pattern, name in sources:
            converter.add_tensor(first, name, pattern, functools.partial(self._read, name, meta=meta))
        made = converter.convert(first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _read(self, name: str, *, meta: bool) -> torch.Tensor:
        stored = self._stored[name]
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta") if meta else stored[...]

    def __getitem__(self, name: str) -> torch.Tensor:
        source, made = self._sources[name]
        if made is None:
            return self._stored[source][...]
        if self._last[0] != source:
            self._last = (source, self._convert(source))
        return self._last[1][made]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources


def conversions_of(model: nn.Module) -> list[Any]:
    """Return what `save_pretrained` undoes when it writes `model` (as in transformers' revert_weight_conversion)."""
    if not isinstance(model, PreTrainedModel):
        return []
    loaded_with = getattr(model, "_weight_conversions", None)
    if loaded_with is not None:
        return list(loaded_with)
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [entry for entry in found if not isinstance(entry, PrefixChange)]


def restore_weights(model: nn.Module, folder: Path, engine: ZeroEngine | None) -> None:
    """Load what `save_pretrained` wrote to `folder` into `model`, sharded or not. All ranks must call.

    Raises:
        CheckpointError: There are no weights, or they do not restore every parameter.
    """
    live = live_state(model)
    with contextlib.ExitStack() as files:
        restored = (_adapters if is_peft_model(model) else _full_weights)(model, folder, live, files)
        if engine is not None:
            engine.load_full_state_dict(restored, strict=False)
            return
        with torch.no_grad():
            for name in (name for name in live if name in restored):
                tensor = restored[name]
                if tensor.shape != live[name].shape:
                    shapes = f"shape {tuple(tensor.shape)} in {folder}, but {tuple(live[name].shape)} in the model"
                    raise CheckpointError(f"{name} has {shapes}.")
                live[name].copy_(tensor)


def _full_weights(
    model: nn.Module, folder: Path, live: Mapping[str, torch.Tensor], files: contextlib.ExitStack
) -> Mapping[str, torch.Tensor]:
    restored = LiveTensors(model, _opened(_weight_files(folder), files))
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    missing = [name for name in live if name not in restored and name not in left_out]
    if missing:
        first = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise CheckpointError(
            f"{folder} does not restore {len(missing)} of {len(live)} tensors of {type(model).__name__}: {first}.\n"
            "It was written from another model or by other conversions."
        )
    return restored


def _opened(paths: Iterable[Path], files: contextlib.ExitStack) -> dict[str, StoredTensor]:
    tensors = {}
    for file in open_files(paths):
        files.callback(file.close)
        tensors.update(file.tensors)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that `save_pretrained` wrote."""
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(f"{folder} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}.")
    try:
        names = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {index}: it is not as save_pretrained writes it") from error
    return [folder / name for name in names]


def _adapters(
    model: Any, folder: Path, live: Mapping[str, torch.Tensor], files: contextlib.ExitStack
) -> Mapping[str, torch.Tensor]:
    restored: dict[str, torch.Tensor] = {}
    paths = adapter_files(model, folder)
    if not paths:
        raise CheckpointError(f"{folder} holds no adapter weights (adapter_model.safetensors).")
    for adapter, path in paths.items():
        tensors = {name: stored[...] for name, stored in _opened([path], files).items()}
        restored.update(adapter_tensors(model, adapter, tensors, live, path))
    return restored
