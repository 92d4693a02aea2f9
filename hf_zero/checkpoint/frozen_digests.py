"""Digests of frozen weights that are not in a checkpoint prove that a resumed run has the same ones.

[Note: Digests of frozen weights]
An adapter's checkpoint need not hold the base model, which has files of its own. It holds one number per frozen
parameter: the sum over elements of a hash of position and bits, modulo 2**64. A sum does not depend on who adds, so
every rank hashes its shard, and the number is the same at every world size and stage. Weights that differ in one bit
are found; a run that was started from another base is an error by name, never a silently other model.
"""

from __future__ import annotations

import torch

from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.checkpoint.writer import Chunked
from hf_zero.distributed.comm import Comm
from hf_zero.errors import CheckpointError
from hf_zero.layout import Slice

FrozenShards = list[tuple[Slice, Chunked]]

_MODULUS = 1 << 64
_CHUNK = 1 << 20
# Odd numbers without structure (the 64-bit golden ratio, and two of Steele et al., 2014), as signed 64-bit integers.
_POSITION, _MIX, _FINAL = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def partial_digest(values: Chunked, slice_: Slice) -> int:
    """Return the part that the elements of `slice_` have in their parameter's digest. `values`: [slice_.numel]."""
    total = 0
    pieces = iter(slice_.pieces)
    position = end = 0  # in the flattened parameter, of the piece that the next elements belong to
    for chunk in values.chunks():
        left = chunk.detach().reshape(-1)
        while left.numel():
            while position == end:
                piece = next(pieces)
                position, end = piece.start, piece.end
            count = min(left.numel(), end - position, _CHUNK)
            total += _hash(left[:count], position)
            left, position = left[count:], position + count
    return total % _MODULUS


def _hash(values: torch.Tensor, first: int) -> int:
    """`values`: elements whose positions in the parameter begin at `first`."""
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).to(torch.int64)
    positions = torch.arange(first, first + values.numel(), device=values.device)
    mixed = (bits ^ (positions * _POSITION)) * _MIX
    mixed ^= mixed >> 29
    return int((mixed * _FINAL).sum())


def full_digests(comm: Comm, shards: FrozenShards) -> dict[str, str]:
    """Name -> digest, as hexadecimal text, of every frozen parameter; `shards`: what this rank answers for.

    All ranks must call. Raises CheckpointError on every rank if any rank could not read its shards.
    """
    by_rank = comm.agree(
        "digests of frozen weights",
        lambda: {slice_.name: partial_digest(values, slice_) for slice_, values in shards},
        CheckpointError,
    )
    totals: dict[str, int] = {}
    for mine in by_rank:
        for name, value in mine.items():
            totals[name] = (totals.get(name, 0) + value) % _MODULUS
    return {name: f"{value:016x}" for name, value in totals.items()}


def check_frozen(comm: Comm, reader: CheckpointReader, shards: FrozenShards) -> None:
    """Raise unless the frozen weights that the checkpoint does not hold are there already. All ranks must call.

    Raises:
        CheckpointError: On every rank; names the first that differ.
    """
    stored = reader.manifest.frozen_digests
    if not stored:
        return
    mine = full_digests(comm, shards)
    other = [name for name in stored if mine.get(name) != stored[name]]
    if other:
        what = "have other values or another type" if any(name in mine for name in other) else "are not frozen"
        raise CheckpointError(
            f"{reader.folder} was saved without the {len(stored)} frozen parameters of its model, and in this run "
            f"{len(other)} of them {what}: {', '.join(other[:3])}.\nLoad the same base "
            "model in the same type before resuming, with the same parameters frozen."
        )
