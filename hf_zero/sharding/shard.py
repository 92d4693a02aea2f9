"""This rank's shard of a flat parameter as tensors: one part per bucket, one or more pieces per parameter."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_zero.layout import Run, UnitLayout


class ShardTensor:
    """One kind of data (parameter, gradient, master weights) for the elements that this rank owns.

    Invariant: the parts tile the shard in shard order; padding elements are zero and stay zero.

    Args:
        memory: 1-D [shard_numel], the shard itself, or with `in_full` 1-D [padded_numel], the full buffer of which
            this rank's parts are views: an fp32 parameter that is whole on every rank needs no second copy as master.
    """

    def __init__(self, layout: UnitLayout, rank: int, memory: torch.Tensor, *, in_full: bool) -> None:
        want = layout.padded_numel if in_full else layout.shard_numel
        if memory.dim() != 1 or memory.numel() != want:
            raise AssertionError(f"{layout.name}: memory of {memory.numel()} elements, expected {want}")
        self.layout = layout
        self.rank = rank
        self.memory = memory
        self.in_full = in_full
        self.parts: list[torch.Tensor] = list(self._cut())

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def nbytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()

    def _cut(self) -> Iterator[torch.Tensor]:
        for start, numel in self.layout.buckets():
            part = numel // self.layout.world_size
            begin = start + self.rank * part if self.in_full else start // self.layout.world_size
            yield self.memory[begin : begin + part]

    def run_tensors(self, run: Run) -> list[torch.Tensor]:
        """Views of the elements of `run`, in order: one tensor where they are contiguous in memory.

        A run that is the whole parameter and contiguous has the parameter's shape.
        """
        if not self.in_full:
            spans = [(run.shard_offset, run.numel)]
        else:
            spans = []
            for piece in run.pieces:
                if spans and sum(spans[-1]) == piece.flat_offset:
                    spans[-1] = (spans[-1][0], spans[-1][1] + piece.numel)
                else:
                    spans.append((piece.flat_offset, piece.numel))
        tensors = [self.memory[start : start + numel] for start, numel in spans]
        return [tensors[0].view(run.shape)] if len(tensors) == 1 and run.is_unsharded else tensors

    def read_run(self, run: Run) -> torch.Tensor:
        """The elements of `run`, 1-D [run.numel]; a view where they are contiguous in memory."""
        views = [view.view(-1) for view in self.run_tensors(run)]
        return views[0] if len(views) == 1 else torch.cat(views)

    def write_run(self, run: Run, values: torch.Tensor) -> None:
        """Set the elements of `run` from `values`, 1-D [run.numel], cast to this one's type."""
        views = [view.view(-1) for view in self.run_tensors(run)]
        for view, chunk in zip(views, torch.split(values, [view.numel() for view in views]), strict=True):
            view.copy_(chunk)

    def copy_from(self, other: ShardTensor) -> None:
        """Take the values of a shard of the same layout, cast to this one's type."""
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.copy_(theirs)

    def scale(self, factor: float) -> None:
        if self.parts:  # a buffer of empty parameters has none, and torch refuses an empty list
            torch._foreach_mul_(self.parts, factor)

    def zero(self) -> None:
        if self.parts:
            torch._foreach_zero_(self.parts)
