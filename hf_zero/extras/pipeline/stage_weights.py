"""Weights of all stages in one state dict, with the names of an nn.Sequential of all layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.distributed.messages import MAX_TAG, MAX_TENSORS, Messages
from hf_zero.extras.pipeline.module import PipelineModule

State = dict[str, torch.Tensor]
_FIRST_TAG = MAX_TAG // 2  # between those of micro-batches and those of tied parameters
_WHAT = "full_state_dict"


def gather_weights(
    mine: State, module: PipelineModule, world: Comm, messages: Messages, *, keep: bool, sends: bool
) -> State:
    """The weights of all stages on the CPU, where `keep`; {} elsewhere. All ranks of the run must call.

    Args:
        mine: Of this stage, where `sends`.
        sends: Whether this rank stands for its stage: one of each does.
    """
    everyone = world.all_gather_object((keep, len(mine) if sends else None), _WHAT)
    if sends:
        for rank in (rank for rank, (keeps, _) in enumerate(everyone) if keeps and rank != world.rank):
            for number, some in enumerate(_batched(mine)):
                messages.send(rank, _FIRST_TAG + number, some, _WHAT)
    found: State = {}
    for rank, (_, count) in enumerate(everyone if keep else ()):
        if rank == world.rank and sends:
            found |= mine
        elif count is not None:
            for number in range(-(-count // MAX_TENSORS)):
                given = messages.receive(rank, _FIRST_TAG + number, _WHAT).wait()
                found |= {name: tensor.cpu() for name, tensor in given.items()}
    messages.wait_for_sends()
    return _as_sequential(found, module)


def _batched(state: State) -> Iterator[State]:
    names = list(state)
    for start in range(0, len(names), MAX_TENSORS):
        yield {name: state[name] for name in names[start : start + MAX_TENSORS]}


def of_this_stage(state: Mapping[str, torch.Tensor], module: PipelineModule) -> State:
    """Drop the entries of layers of other stages, and of parameters that one of those trains for this one."""
    own = {str(layer) for chunk in range(module.virtual_stages) for layer in module.chunk_layers(chunk)}
    others = {str(layer) for layer in range(module.parts[-1])} - own
    owner_of = module.canonical_names
    return {name: value for name, value in state.items() if owner_of.get(name, name).partition(".")[0] not in others}


def _as_sequential(state: State, module: PipelineModule) -> State:
    """List tied parameters under all of their names, in the order of layers."""
    aliases = {name: state[first] for name, first in module.canonical_names.items() if first in state}
    whole = {**aliases, **state}
    return {name: whole[name] for name in sorted(whole, key=_place)}


def _place(name: str) -> tuple[int, str]:
    first = name.partition(".")[0]
    return (int(first), "") if first.isdecimal() else (1 << 31, "")
