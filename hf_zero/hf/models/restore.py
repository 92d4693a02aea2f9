"""Restores Hugging Face weight folders by the names that live parameters have.

`save_pretrained` may rename and reshape on the way out (GPT-NeoX's `lm_head` becomes `embed_out`, experts are taken
apart), and `load_state_dict` knows nothing of it. So a folder is read back through the model's own conversions, every
tensor when it is needed, and a parameter that the folder does not restore is an error.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import CheckpointError
from hf_zero.hf.models.name_matching import match_stored
from hf_zero.hf.models.peft import (
    adapter_files,
    adapter_tensors,
    is_peft_model,
    live_state,
)


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files under their stored names, each read when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """`files`: stored name -> the file it is in."""
        self._files = dict(files)
        self._open: dict[Path, Any] = {}

    @classmethod
    def of_file(cls, path: Path) -> StoredTensors:
        with safetensors.safe_open(path, framework="pt") as file:
            return cls(dict.fromkeys(file.keys(), path))

    @classmethod
    def of_folder(cls, folder: Path) -> StoredTensors:
        """The weights that `save_pretrained` wrote.

        Raises:
            CheckpointError: There are none, or a file that the index names is missing.
        """
        single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
        if single.is_file():
            return cls.of_file(single)
        if not index.is_file():
            raise CheckpointError(f"{folder} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}.")
        files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        missing = sorted({str(path) for path in files.values() if not path.is_file()})
        if missing:
            raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}.")
        return cls(files)

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safetensors.safe_open(path, framework="pt")
        tensor: torch.Tensor = self._open[path].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class LiveTensors(Mapping[str, torch.Tensor]):
    """Stored tensors under the names of a model's state dict, converted as `from_pretrained` would convert them."""

    def __init__(self, model: nn.Module, stored: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._stored = stored
        self._direct: dict[str, str] = {}  # live name -> stored name
        self._groups: dict[str, list[tuple[str, str]]] = {}  # first live name -> (pattern, stored name) of its sources
        self._group_of: dict[str, str] = {}  # live name that a conversion makes -> first live name
        self._converters: dict[str, WeightConverter] = {}  # source pattern -> converter
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self._match(live_state(model))

    def _match(self, live: Mapping[str, torch.Tensor]) -> None:
        conversions = conversions_of(self._model)
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._converters = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        for name, (target, pattern) in match_stored(self._model, self._stored, conversions, live).items():
            if target in live and pattern is None:
                self._direct[target] = name
            elif target in live and pattern is not None:
                self._groups.setdefault(target, []).append((pattern, name))
        for first in self._groups:
            self._group_of.update(dict.fromkeys(self._convert(first, meta=True), first))
        self._add_tied_names(live)

    def _add_tied_names(self, live: Mapping[str, torch.Tensor]) -> None:
        """A tied parameter is stored under one of its names; it is restored under all of them."""
        names_of: dict[int, list[str]] = {}
        for name, tensor in live.items():
            names_of.setdefault(id(tensor), []).append(name)
        for names in names_of.values():
            known = next((name for name in names if name in self), None)
            for name in names if known is not None else ():
                if name not in self and known in self._direct:
                    self._direct[name] = self._direct[known]
                elif name not in self and known is not None:
                    self._group_of[name] = self._group_of[known]

    def _convert(self, first: str, *, meta: bool = False) -> dict[str, torch.Tensor]:
        """Run one conversion. With `meta`, on tensors without data, to learn the names it makes."""
        sources = self._groups[first]
        converter = copy.deepcopy(self._converters[sources[0][0]])
        for pattern, name in sources:
            converter.add_tensor(first, name, pattern, functools.partial(self._read, name, meta=meta))
        made = converter.convert(first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _read(self, name: str, *, meta: bool) -> torch.Tensor:
        tensor = self._stored[name]
        return torch.empty_like(tensor, device="meta") if meta else tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._direct:
            return self._stored[self._direct[name]]
        first = self._group_of[name]
        if self._last[0] != first:
            self._last = (first, self._convert(first))
        made = self._last[1]
        return made[name] if name in made else made[self._twin(name, made)]

    def _twin(self, name: str, made: Mapping[str, torch.Tensor]) -> str:
        live = live_state(self._model)
        return next(other for other in made if live.get(other) is live[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._direct
        yield from self._group_of

    def __len__(self) -> int:
        return len(self._direct) + len(self._group_of)

    def __contains__(self, name: object) -> bool:
        return name in self._direct or name in self._group_of


def conversions_of(model: nn.Module) -> list[Any]:
    """What `save_pretrained` undoes when it writes `model` (as in transformers' revert_weight_conversion)."""
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
    if is_peft_model(model):
        restored: Mapping[str, torch.Tensor] = _adapters(model, folder, live)
    else:
        restored = LiveTensors(model, StoredTensors.of_folder(folder))
        left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        missing = [name for name in live if name not in restored and name not in left_out]
        if missing:
            raise CheckpointError(
                f"{folder} does not restore {len(missing)} of {len(live)} tensors of {type(model).__name__}: "
                f"{_listed(missing)}.\nIt was written from another model or by other conversions."
            )
    if engine is not None:
        engine.load_full_state_dict(restored, strict=False)
        return
    with torch.no_grad():
        for name, target in live.items():
            if name in restored:
                target.copy_(_attachment(name, restored[name], target, folder))


def _adapters(model: Any, folder: Path, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    restored: dict[str, torch.Tensor] = {}
    files = adapter_files(model, folder)
    if not files:
        raise CheckpointError(f"{folder} holds no adapter weights (adapter_model.safetensors).")
    for adapter, path in files.items():
        restored.update(adapter_tensors(model, adapter, StoredTensors.of_file(path), live, path))
    return restored


def _attachment(name: str, tensor: torch.Tensor, target: torch.Tensor, folder: Path) -> torch.Tensor:
    if tensor.shape != target.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)} in {folder}, but {tuple(target.shape)} in the model."
        )
    return tensor


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
