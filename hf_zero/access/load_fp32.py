"""Puts the weights of a checkpoint into a model, plain or sharded, at any world size."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from hf_zero.checkpoint.lazy_state_dict import LazyStateDict, load_fp32_state_dict, match_names
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.errors import CheckpointError
from hf_zero.runtime.full_weights import own_tensors

ModelT = TypeVar("ModelT", bound=nn.Module)


def load_fp32_into(model: ModelT, folder: str | Path, tag: str | None = None, strict: bool = True) -> ModelT:
    """Load the fp32 weights of a checkpoint, cast to the model's own types and put on its devices; returns the model.

    A plain model takes the memory of one more tensor, on the CPU; any process may call. A model that hf_zero manages
    takes that of one more unit on every rank, its masters start from these values and its optimizer state stays; all
    ranks must call.

    Args:
        folder: The checkpoint's folder, as in `load_fp32_state_dict`.
        tag: The checkpoint in `folder`, as in `load_fp32_state_dict`.
        strict: Names that only the model or only the checkpoint has are errors.
    Raises:
        CheckpointError: The folder holds no complete checkpoint, or it does not fit the model (all differences are
            listed): nothing has been loaded then, on any rank. Or a file turns out damaged while it is read.
        StateError: Not all ranks called, for a model that hf_zero manages.
    """
    engine = engine_of(model)
    if engine is not None:
        _load_into_engine(engine, folder, tag, strict)
        return model
    own = dict(own_tensors(model))
    with load_fp32_state_dict(folder, tag) as state, torch.no_grad():
        for name, stored in match_names(own, state, strict=strict).items():
            own[name].copy_(state[stored])
    return model


def _load_into_engine(engine: ZeroEngine, folder: str | Path, tag: str | None, strict: bool) -> None:
    engine.require_all_ranks("load_fp32_into")
    opened: list[LazyStateDict] = []
    matched: dict[str, str] = {}

    def match() -> None:
        opened.append(load_fp32_state_dict(folder, tag))
        matched.update(match_names(dict(own_tensors(engine.module)), opened[0], strict=strict))

    engine.comm.agree("load_fp32_into", match, CheckpointError)
    with opened[0] as state:
        units = [[slot.name for flat in unit.flats for slot in flat.layout.slots] for unit in engine.units]
        flats = list(matched.keys() - {name for names in units for name in names})
        for names in [*units, flats]:  # one by one: what is loaded at once is in memory at once
            full = {name: state[matched[name]] for name in names if name in matched}
            engine.load_full_state_dict(full, strict=False)
