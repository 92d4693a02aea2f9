"""Means over ranks that travel as one bit per element, with error feedback.

[Note: The compressed mean]
Every rank adds to its tensor what it could not send the last time (the worker's error), sends the signs and one scale
per tensor, |x| / sqrt(n), and keeps the difference for the next time. Rank r gets the r-th part of each tensor from
all ranks, takes the mean, adds what it could not send itself (the server's error), and sends signs and a scale of that
part to all ranks. So two messages per call, each of one bit per element and four bytes per tensor and rank, whatever
the number of tensors. Zero counts as positive. Source: Tang et al. 2021, section 4; DeepSpeed's compressed_allreduce.
Parts are multiples of 8 elements; padding takes no part in scales and errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.distributed.comm import Comm

_BITS = 8


@dataclass(frozen=True)
class _Columns:
    """The places of tensors in a matrix with one row per rank: row r has the r-th part of each, in turn."""

    starts: list[int]
    widths: list[int]
    numels: list[int]
    widths_there: torch.Tensor  # int64 [tensors], on the tensors' device

    @classmethod
    def of(cls, numels: Sequence[int], world_size: int, device: torch.device) -> _Columns:
        widths = [-(-numel // (world_size * _BITS)) * _BITS for numel in numels]
        starts = [sum(widths[:i]) for i in range(len(widths))]
        return cls(starts, widths, list(numels), torch.tensor(widths, device=device))

    @property
    def total(self) -> int:
        return sum(self.widths)

    def real(self, index: int, row: int) -> int:
        """The number of elements of part `row` of tensor `index` that are not padding."""
        width = self.widths[index]
        return min(max(self.numels[index] - row * width, 0), width)


class SignMean:
    """Compressed means of the same tensors again and again. See [Note: The compressed mean].

    It keeps one worker's error per element, and a server's error for this rank's part.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._worker: dict[int, torch.Tensor] = {}
        self._server: dict[int, torch.Tensor] = {}
        self._columns: _Columns | None = None  # of the last call

    def reset(self) -> None:
        """Errors start from zero again."""
        self._worker.clear()
        self._server.clear()

    @property
    def nbytes(self) -> int:
        held = [*self._worker.values(), *self._server.values()]
        return sum(error.numel() * error.element_size() for error in held)

    def average(self, keys: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Make each of `tensors` (contiguous, one floating-point type) its compressed mean, in place.

        All ranks must call, with tensors of the same shapes in the same order. `keys` name whose errors are whose.
        """
        if not tensors:
            return
        world, rank = self._comm.world_size, self._comm.rank
        columns = self._columns_of(tensors)
        sent = self._compress_mine(columns, keys, tensors)
        received = torch.empty_like(sent)
        self._comm.all_to_all(received.view(-1), sent.view(-1), "signs of momenta").wait()
        part = self._mean_of_part(columns, received, tensors[0].dtype)
        signs = torch.zeros(columns.total, dtype=torch.bool, device=part.device)
        scales = []
        for index, (start, key) in enumerate(zip(columns.starts, keys, strict=True)):
            values = part[start : start + columns.real(index, rank)]
            error = self._server.setdefault(id(key), torch.zeros_like(values))
            values += error
            scales.append(_split(values, signs[start : start + values.numel()], error))
        message = _pack(signs[None], torch.stack(scales)[None])[0]
        everyone = torch.empty(world * message.numel(), dtype=torch.uint8, device=message.device)
        self._comm.all_gather(everyone, message, "signs of mean momenta").wait()
        mean = torch.empty(world, columns.total, dtype=part.dtype, device=part.device)
        for row, theirs in enumerate(everyone.view(world, -1)):
            mean[row] = _unpack(columns, theirs, part.dtype)
        for tensor, start, width in zip(tensors, columns.starts, columns.widths, strict=True):
            tensor.view(-1).copy_(mean[:, start : start + width].reshape(-1)[: tensor.numel()])

    def _columns_of(self, tensors: Sequence[torch.Tensor]) -> _Columns:
        """The columns of the last call if they fit: copying new ones to a device makes the host wait."""
        numels, device = [tensor.numel() for tensor in tensors], tensors[0].device
        known = self._columns
        if known is None or known.numels != numels or known.widths_there.device != device:
            known = self._columns = _Columns.of(numels, self._comm.world_size, device)
        return known

    def _compress_mine(
        self, columns: _Columns, keys: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Messages to all ranks, bytes [world, ...]: the signs of their parts, and the scales of the tensors."""
        world, device = self._comm.world_size, tensors[0].device
        signs = torch.zeros(world, columns.total, dtype=torch.bool, device=device)
        scales = []
        for tensor, key, start, width in zip(tensors, keys, columns.starts, columns.widths, strict=True):
            flat = tensor.view(-1)
            error = self._worker.setdefault(id(key), torch.zeros_like(flat))
            padded = torch.zeros(world * width, dtype=torch.bool, device=device)
            scales.append(_split(flat + error, padded[: flat.numel()], error))
            signs[:, start : start + width] = padded.view(world, width)
        return _pack(signs, torch.stack(scales).expand(world, -1))

    def _mean_of_part(self, columns: _Columns, received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        mean = torch.zeros(columns.total, dtype=dtype, device=received.device)
        for theirs in received:
            mean += _unpack(columns, theirs, dtype)
        return mean.div_(self._comm.world_size)


def _split(values: torch.Tensor, signs: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Write the signs of `values` and what signs times scale miss; return the scale, fp32 0-dim."""
    scale: torch.Tensor = (torch.linalg.vector_norm(values) / max(values.numel(), 1) ** 0.5).float()
    torch.ge(values, 0, out=signs)
    error.copy_(values - torch.where(signs, scale, -scale))
    return scale


def _pack(signs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack bool [rows, n] and fp32 [rows, tensors] into bytes [rows, n / 8 + 4 tensors]."""
    powers = 2 ** torch.arange(_BITS, device=signs.device, dtype=torch.uint8)
    packed = (signs.view(len(signs), -1, _BITS) * powers).sum(-1, dtype=torch.uint8)
    return torch.cat([packed, scales.contiguous().view(torch.uint8)], 1)


def _unpack(columns: _Columns, message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One row of `_pack` -> signs times scales, [n]."""
    end = columns.total // _BITS
    shifts = torch.arange(_BITS, device=message.device, dtype=torch.uint8)
    signs = (message[:end, None] >> shifts & 1).view(-1).to(dtype).mul_(2).sub_(1)
    scales = message[end:].clone().view(torch.float32).to(dtype)
    return signs.mul_(scales.repeat_interleave(columns.widths_there, output_size=columns.total))
