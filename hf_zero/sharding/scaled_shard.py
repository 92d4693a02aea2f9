"""A shard of values with 8 or 16 bits, each parameter's with a scale of its own (FP8-LM, Peng et al. 2023).

Outside it is a shard of fp32: who reads gets the values, who writes gives them, and the rounding is in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from hf_zero.fp8.scaled_casts import Segments, amaxes, cast, cast_and_amax, scales_for, uncast
from hf_zero.fp8.stochastic_rounding import round_to_fp16_digits
from hf_zero.layout import Slice, UnitLayout
from hf_zero.sharding.shard import Shard, ShardTensor, placeholder, slices_by_name
from hf_zero.storage.base import BorrowedTensors

_CHUNK_NUMEL = 1 << 20


class ParamRange(NamedTuple):
    """Consecutive parameters of a shard, and the padding between them, which are rounded together."""

    numbers: slice
    memory: slice
    segments: Segments  # the parameters inside of `memory`
    places: list[tuple[int, int, int]]  # pieces: where in `memory`, their first place in the parameter, elements
    each: Segments  # one element for each parameter


class ScaledShard(Shard):
    """A shard in the device's memory whose elements are `stored / scale`. Arrays over parameters follow the slots.

    Invariants:
      - No value that this rank stores of a parameter is larger than its entry in `amaxes`; after `encode` it is the
        largest one as it is stored.
      - A scale is a power of two where `encode` chose it: then values of normal range are rounded once.

    Args:
        stored: The type of the elements: torch.float8_e4m3fn, torch.float8_e5m2 or torch.float16.
    """

    def __init__(self, layout: UnitLayout, rank: int, device: torch.device, stored: torch.dtype) -> None:
        super().__init__(layout, rank, torch.float32)
        self.memory = torch.zeros(layout.shard_numel, dtype=stored, device=device)
        self._slices = slices_by_name(layout, rank)
        owned = {name: (one.shard_offset, one.shard_offset + one.numel) for name, one in self._slices.items()}
        self.spans: list[tuple[int, int]] = []  # of each parameter, empty where this rank owns nothing of it
        for slot in layout.slots:
            end = self.spans[-1][1] if self.spans else 0
            self.spans.append(owned.get(slot.name, (end, end)))
        self.segments = Segments(self.spans)
        self._ranges: dict[tuple[int, int], ParamRange] = {}
        self.scales = torch.ones(len(self.spans), device=device)
        self.amaxes = torch.zeros(len(self.spans), device=device)
        self._number_of = {slot.name: number for number, slot in enumerate(layout.slots)}

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + self.scales.nbytes

    @property
    def in_memory(self) -> None:
        return None

    # ---------------------------------------------------------------- some parameters
    def range_of(self, first: int, end: int) -> ParamRange:
        """Return the parameters from number `first` up to `end`, at least one."""
        if (first, end) not in self._ranges:
            self._ranges[first, end] = self._make_range(first, end)
        return self._ranges[first, end]

    def _make_range(self, first: int, end: int) -> ParamRange:
        start, spans = self.spans[first][0], self.spans[first:end]
        places = []
        for number, (low, _) in enumerate(spans, first):
            slice_ = self._slices.get(self.layout.slots[number].name)
            for piece in () if slice_ is None else slice_.pieces:
                places.append((low - start, piece.start, piece.numel))
                low += piece.numel
        segments = Segments([(low - start, high - start) for low, high in spans])
        each = Segments([(at, at + 1) for at in range(end - first)])
        return ParamRange(slice(first, end), slice(start, spans[-1][1]), segments, places, each)

    def encode(
        self, params: ParamRange, values: torch.Tensor, bounds: torch.Tensor | None = None, seed: int | None = None
    ) -> None:
        """Round the values of `params`, fp32 1-D, to what is stored. What is between them becomes zero.

        Args:
            bounds: No value of any rank is larger, 1-D over `params`: the scales are then the same on all ranks that
                give the same.
            seed: Round to fp16 at random, and change `values` so: see stochastic_rounding.py. None: to the nearest.
        """
        stored = self.memory[params.memory]
        if seed is not None:
            round_to_fp16_digits(values, params.places, seed)
        if bounds is None:
            found = amaxes(values, params.segments)
            scales = scales_for(found, stored.dtype)
            cast(values, stored, params.segments, scales)
        else:
            scales = scales_for(bounds.to(self.scales), stored.dtype)
            found = cast_and_amax(values, stored, params.segments, scales)
        self.scales[params.numbers] = scales
        self.amaxes[params.numbers] = self._rounded(found, params.each, scales)

    def _rounded(self, found: torch.Tensor, each: Segments, scales: torch.Tensor) -> torch.Tensor:
        """The largest values as they are stored: rounding keeps the order, so the largest stays the largest."""
        stored = torch.empty_like(found, dtype=self.memory.dtype)
        cast(found, stored, each, scales)
        uncast(stored, found, each, scales)
        return found

    def decode(self, params: ParamRange) -> torch.Tensor:
        """The values of `params`, fp32 1-D, in memory of their own, and zero between them."""
        stored = self.memory[params.memory]
        values = torch.zeros(stored.numel(), device=stored.device)
        uncast(stored, values, params.segments, self.scales[params.numbers])
        return values

    def _param(self, number: int) -> ParamRange:
        return self.range_of(number, number + 1)

    def rescale(self, number: int, bound: torch.Tensor) -> None:
        """Store parameter `number` with the scale of `bound`, 0-dim: the same on all ranks that give the same."""
        if not torch.equal(scales_for(bound.reshape(1).to(self.scales), self.memory.dtype), self.scales[number:][:1]):
            self.encode(self._param(number), self.decode(self._param(number)), bound.reshape(1))

    def stored_slice(self, slice_: Slice) -> tuple[torch.Tensor, float]:
        """The elements of a slice as they are stored, a view, and their scale."""
        number = self._number_of[slice_.name]
        start, end = self.spans[number]
        return self.memory[start:end], self.scales[number].item()

    # ---------------------------------------------------------------- all of it
    def encode_all(self, values: torch.Tensor, bounds: torch.Tensor) -> None:
        """Round all values of the shard, fp32 1-D; `bounds`: see `encode`, 1-D over the parameters."""
        self._set_bounds(bounds)
        cast(values, self.memory, self.segments, self.scales)

    def set_stored(self, stored: torch.Tensor, bounds: torch.Tensor) -> None:
        """Take elements that were rounded with the scales of `bounds`."""
        self.memory.copy_(stored)
        self._set_bounds(bounds)

    def _set_bounds(self, bounds: torch.Tensor) -> None:
        self.scales = scales_for(bounds, self.memory.dtype)
        self.amaxes = bounds

    @property
    def parts(self) -> list[torch.Tensor]:
        """All values of the shard, fp32, in order; see `chunks`."""
        return list(self.chunks(0, self.layout.shard_numel))

    def scale(self, factor: float) -> None:
        """Multiply all values, without another rounding."""
        self.scales = self.scales / factor
        self.amaxes = self.amaxes * abs(factor)

    def zero(self) -> None:
        """Make all values zero."""
        self.memory.zero_()
        self.scales.fill_(1.0)
        self.amaxes.zero_()

    # ---------------------------------------------------------------- Shard
    def chunks(self, start: int, numel: int) -> Iterator[torch.Tensor]:
        end = start + numel
        for low, high, number in self._parts(start, end):
            for at in range(low, high, _CHUNK_NUMEL):
                part = self.memory[at : min(at + _CHUNK_NUMEL, high)]
                values = torch.zeros(part.numel(), device=part.device)
                if number is not None:
                    uncast(part, values, Segments([(0, part.numel())]), self.scales[number : number + 1])
                yield values

    def _parts(self, start: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """The elements [start, end) of the shard in order, with their parameter: None for padding."""
        at = start
        for number, (first, last) in enumerate(self.spans):
            low, high = max(at, first), min(end, last)
            if low < high:
                if at < low:
                    yield at, low, None
                yield low, high, number
                at = high
        if at < end:
            yield at, end, None

    def slice_tensors(self, slice_: Slice) -> list[torch.Tensor]:
        shape = slice_.shape if slice_.is_unsharded else (slice_.numel,)
        return [placeholder(shape, self.dtype, self.memory.device)]

    def read_slice(self, slice_: Slice) -> torch.Tensor:
        return self.decode(self._param(self._number_of[slice_.name]))

    def write_slice(self, slice_: Slice, values: torch.Tensor) -> None:
        self.encode(
            self._param(self._number_of[slice_.name]), values.reshape(-1).to(self.memory.device, torch.float32)
        )

    def _targets(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number, (start, end) in enumerate(self.spans):
            values = torch.empty(end - start, device=self.memory.device)
            yield start, values
            self.encode(self._param(number), values)

    def borrow(self) -> tuple[ShardTensor, BorrowedTensors | None]:
        raise AssertionError(f"{self.layout.name}: values of {self.memory.dtype} are read by decode")

    def borrow_to_write(self) -> BorrowedTensors:
        raise AssertionError(f"{self.layout.name}: values of {self.memory.dtype} are written by encode")
