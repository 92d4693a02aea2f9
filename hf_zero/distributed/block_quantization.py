"""Blocks of 8-bit integers with a scale each: what crosses slow links where the configuration asks for it.

A block is 256 consecutive elements, the last one perhaps fewer. Its scale is its largest magnitude / 127, in fp32, and
an element is stored as the nearest integer to element / scale. So an element x of a block with the largest magnitude m
comes back as y with |x - y| <= m / 254 (and a rounding in fp32). A block with an infinity or a NaN comes back without
a finite element: an overflow stays one. Message of n elements: 4 bytes per block, then n bytes.
"""

from __future__ import annotations

import torch

_BLOCK = 256
_MOST = 127
_TINY = torch.finfo(torch.float32).tiny  # the scale of a block of zeros


def quantize(rows: torch.Tensor) -> torch.Tensor:
    """Return the message of each row, uint8 [number of rows, bytes].

    Args:
        rows: Of any floating type, 2-D. Numbers beyond fp32's become infinite.
    """
    blocks = _blocks(rows.float())
    scales = (blocks.abs().amax(2, keepdim=True) / _MOST).clamp_min_(_TINY)
    integers = (blocks / scales).round_().to(torch.int8).flatten(1)[:, : rows.shape[1]]
    return torch.cat([scales.flatten(1).view(torch.uint8), integers.view(torch.uint8)], 1)


def dequantize(messages: torch.Tensor, numel: int) -> torch.Tensor:
    """Return what `quantize` made messages of, fp32 [number of rows, numel]."""
    scale_bytes = message_bytes(numel) - numel
    scales = messages[:, :scale_bytes].contiguous().view(torch.float32)
    blocks = _blocks(messages[:, scale_bytes:].view(torch.int8)) * scales.unsqueeze(2)
    return blocks.flatten(1)[:, :numel]


def message_bytes(numel: int) -> int:
    """Return the size of the message of so many elements."""
    return numel + 4 * -(-numel // _BLOCK)


def sum_messages(out: torch.Tensor, messages: torch.Tensor) -> None:
    """Add up what the messages hold, in fp32 and in their order, into `out` (1-D)."""
    first, *others = dequantize(messages, out.numel())
    for row in others:
        first += row
    out.copy_(first)


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    missing = -rows.shape[1] % _BLOCK
    whole = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    return whole.view(len(rows), whole.shape[1] // _BLOCK, _BLOCK)
