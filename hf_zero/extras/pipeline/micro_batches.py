"""Reads the micro-batches of a batch, and makes sure that all ranks go on with the same ones, or none."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from hf_zero.extras.pipeline.batch_run import StageLocation

# Bytes of each tensor that ranks compare: all of token ids, the beginning of images.
_COMPARED_BYTES = 1 << 16


@dataclass
class _Read:
    """A rank's report to the others on the micro-batches that it has read."""

    places: list[tuple[str, int]] = field(default_factory=list)  # of each micro-batch: shapes and types, checksum
    problem: str = ""


class RepeatingLoader:
    """An iterator over a loader that begins anew at its end. It ends if there is nothing in the loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is not None:
            with contextlib.suppress(StopIteration):
                return next(self._iterator)
        self._iterator = iter(self.loader)
        return next(self._iterator)


Batch = list[tuple[Any, Any]]
Reader = Callable[[], Iterator[Any]]


def read_micro_batches(
    reader: Reader, count: int, comm: Comm, place: StageLocation, prepare: Callable[[Any], Any] | None
) -> Batch:
    """(inputs, labels) of `count` micro-batches: on the first stage inputs, on the last labels, on others neither.

    Both stages read, and must find the same. All ranks must call.

    Args:
        reader: Gives what to read from.
        comm: Of all ranks of the run.
        prepare: Makes (inputs, labels) of what was read; None: it is that.
    Raises:
        StopIteration: On all ranks, where none of them has a micro-batch left.
        StateError: On all ranks, if they have different numbers of micro-batches or different ones, or cannot read.
    """
    is_first, is_last = place.stage == 0, place.stage == place.num_stages - 1
    batch: Batch = []
    mine = _Read()
    if is_first or is_last:
        batch = _read(reader, count, prepare, mine, place.stage)
    told = comm.all_gather_object((count, place.ranks, mine), "micro-batches")
    _agree_on_number([one[0] for one in told])
    _agree([one[1:] for one in told], count, place.num_stages)
    moved = [
        (_on(comm.device, inputs) if is_first else None, _on(comm.device, labels) if is_last else None)
        for inputs, labels in batch
    ]
    return moved or [(None, None)] * count


def _read(reader: Reader, count: int, prepare: Callable[[Any], Any] | None, mine: _Read, stage: int) -> Batch:
    batch: Batch = []
    try:
        iterator = _iterator(reader())
        for _ in range(count):
            try:
                given = next(iterator)
            except StopIteration:
                break
            batch.append(_pair(given if prepare is None else prepare(given)))
            mine.places.append(_described(batch[-1]))
    except Exception as error:  # of the user's iterator or function
        kind = "" if isinstance(error, StateError) else f"{type(error).__name__}: "
        mine.problem = f"stage {stage}: micro-batch {len(batch)} cannot be read: {kind}{error}"
    return batch


def _iterator(given: Any) -> Iterator[Any]:
    if hasattr(given, "__next__"):
        return given  # type: ignore[no-any-return]
    raise StateError(
        f"the data is a {type(given).__name__}: expected an iterator, which goes on where the last batch ended. Make "
        "one with iter(...), or call engine.set_dataloader and train_batch without an argument."
    )


def _pair(given: Any) -> tuple[Any, Any]:
    if isinstance(given, tuple | list) and len(given) == 2:
        return given[0], given[1]
    size = f" of {len(given)}" if isinstance(given, tuple | list | dict) else ""
    raise StateError(
        f"it is a {type(given).__name__}{size}: expected (inputs, labels).\n"
        "engine.set_batch_fn(function) sets what makes that of a micro-batch."
    )


def _described(value: Any) -> tuple[str, int]:
    leaves = pytree.tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    checksum = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)[: max(1, _COMPARED_BYTES // max(1, tensor.element_size()))]
        checksum = zlib.crc32(flat.cpu().contiguous().view(torch.uint8).numpy().data, checksum)
    shapes = ", ".join(f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in tensors)
    return shapes, checksum


def _agree_on_number(counts: Sequence[int]) -> None:
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise StateError(
                f"rank {rank} is at a batch of {count} micro-batches, rank 0 at one of {counts[0]}.\nCall train_batch "
                "and eval_batch on all ranks alike, and set_train_batch_size too."
            )


def _agree(everyone: Sequence[tuple[tuple[int, ...], _Read]], count: int, num_stages: int) -> None:
    """Raise, alike on all ranks, what stands against this batch."""
    if problems := [f"rank {rank}, {read.problem}" for rank, (_, read) in enumerate(everyone) if read.problem]:
        raise StateError("\n".join(problems))
    pipelines = sorted({ranks for ranks, _ in everyone})
    readers = sorted({rank for ranks in pipelines for rank in (ranks[0], ranks[-1])})
    numbers = {rank: len(everyone[rank][1].places) for rank in readers}
    if not any(numbers.values()):
        raise StopIteration
    if short := {rank: number for rank, number in numbers.items() if number < count}:
        told = ", ".join(f"rank {rank} {number}" for rank, number in short.items())
        raise StateError(
            f"the data iterator ended in the middle of a batch: of {count} micro-batches "
            f"(gradient_accumulation_steps) there were on {told}.\nGive train_batch an iterator whose length is a "
            "multiple of it, or one that begins anew (hf_zero.utils.RepeatingLoader)."
        )
    for ranks in pipelines:
        first, last = everyone[ranks[0]][1].places, everyone[ranks[-1]][1].places
        for number, (given, other) in enumerate(zip(first, last, strict=True)):
            if given != other:
                what = "other values" if given[0] == other[0] else f"{other[0]} instead of {given[0]}"
                raise StateError(
                    f"micro-batch {number} is another one on rank {ranks[-1]} (stage {num_stages - 1}), which takes "
                    f"the labels, than on rank {ranks[0]} (stage 0), which takes the inputs: {what}.\nBoth read "
                    "the same data: seed the shuffling of their data loaders alike, and shard it by "
                    "grid.data_parallel_id alone."
                )


def _on(device: torch.device, value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
