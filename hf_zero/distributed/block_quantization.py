"""Blocks of 8-bit integers with a scale each: what crosses slow links where the configuration asks for it.

A block is 256 consecutive elements, the last one perhaps fewer. Its scale is its largest magnitude / 127, in fp32, and
an element is stored as the nearest integer to element / scale. So an element x of a block with the largest magnitude m
comes back as y with |x - y| <= m / 254 (and a rounding in fp32). A block with an infinity or a NaN comes back without
a finite element: an overflow stays one. Message of n elements: 4 bytes per block, then n bytes.

The functions run by torch's operations, and on CPU tensors by the native library where it is there, with the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hf_zero.native.int8_blocks import quantize_row, sum_rows
from hf_zero.native.library import has_library

_BLOCK = 256
_MOST = 127
_TINY = torch.finfo(torch.float32).tiny  # the scale of a block of zeros
# The elements that torch's operations take at a time: what is computed on the way takes 64 MB a tensor on a device,
# and not as much as the unsharded layer.
_AT_A_TIME = 1 << 24


def quantize(rows: torch.Tensor) -> torch.Tensor:
    """Return the message of each row, uint8 [number of rows, bytes].

    Args:
        rows: Of any floating type, 2-D and contiguous. Numbers beyond fp32's become infinite.
    """
    numel = rows.shape[1]
    messages = rows.new_empty((len(rows), message_bytes(numel)), dtype=torch.uint8)
    if _is_native(rows):
        for row, message in zip(rows, messages, strict=True):
            quantize_row(row, message)
        return messages
    scales, integers = _halves(messages, numel)
    for piece, blocks in _pieces(rows):
        values = _blocks(rows[:, piece].float())
        scale = values.abs().amax(2, keepdim=True).div_(_MOST).clamp_min_(_TINY)
        nearest = (values / scale).round_().to(torch.int8).flatten(1)
        integers[:, piece] = nearest[:, : piece.stop - piece.start].view(torch.uint8)
        scales[:, blocks] = scale.flatten(1).view(torch.uint8)
    return messages


def dequantize(messages: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """Write what each message holds to its place: 1-D and contiguous, of any floating type."""
    if _is_native(messages):
        for message, place in zip(messages.unsqueeze(1), places, strict=True):
            sum_rows(message, place)
        return
    for piece, values in _values(messages, places[0].numel()):
        for place, value in zip(places, values, strict=True):
            place[piece] = value


def sum_messages(out: torch.Tensor, messages: torch.Tensor) -> None:
    """Add up what the messages hold, in fp32 and in their order, into `out`: 1-D and contiguous."""
    if _is_native(messages):
        sum_rows(messages, out)
        return
    for piece, (first, *others) in _values(messages, out.numel()):
        for row in others:
            first += row
        out[piece] = first


def message_bytes(numel: int) -> int:
    """Return the size of the message of so many elements."""
    return numel + 4 * -(-numel // _BLOCK)


def _is_native(memory: torch.Tensor) -> bool:
    return memory.device.type == "cpu" and has_library()


def _values(messages: torch.Tensor, numel: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield what messages hold, piece by piece: where it lies in their rows, and fp32 [number of rows, elements]."""
    scales, integers = _halves(messages, numel)
    for piece, blocks in _pieces(integers):
        scale = scales[:, blocks].contiguous().view(torch.float32)
        values = _blocks(integers[:, piece].view(torch.int8).float()) * scale.unsqueeze(2)
        yield piece, values.flatten(1)[:, : piece.stop - piece.start]


def _halves(messages: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the scales, and those of the elements."""
    at = message_bytes(numel) - numel
    return messages[:, :at], messages[:, at:]


def _pieces(rows: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Divide rows into pieces of whole blocks; yield their elements and the bytes of their scales."""
    number, numel = rows.shape
    length = max(_AT_A_TIME // number // _BLOCK, 1) * _BLOCK
    for start in range(0, numel, length):
        stop = min(start + length, numel)
        yield slice(start, stop), slice(4 * (start // _BLOCK), 4 * -(-stop // _BLOCK))


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    missing = -rows.shape[1] % _BLOCK
    whole = torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()
    return whole.view(len(rows), whole.shape[1] // _BLOCK, _BLOCK)
