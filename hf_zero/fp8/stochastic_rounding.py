"""Rounding of fp32 to the 11 binary digits of fp16 at random, so that the mean of many roundings is the value itself.

A master weight of fp16 that is rounded to the nearest value stays where it is while updates are less than half a unit
of its last digit, which is 2.4e-4 of the weight: a fine-tuning with a rate of 1e-5 would stand still. The random
numbers are a hash of the element's place in its parameter and of the seed, so they are the same on every device, at
every stage and number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.native.float8 import round_fp16
from hf_zero.native.library import has_library

_DIGITS = 13  # binary digits that fp32 has and fp16 has not
_LOW = (1 << _DIGITS) - 1
_GOLDEN = 0x9E3779B1 - (1 << 32)  # as signed 32-bit numbers
_FIRST, _SECOND = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)


@torch.no_grad()
def round_to_fp16_digits(values: torch.Tensor, places: Sequence[tuple[int, int, int]], seed: int) -> None:
    """Round `values` (fp32, 1-D) in place to one of the two neighbours with 11 digits, the nearer one oftener.

    Values without digits beyond the eleventh, infinities and NaN stay.

    Args:
        places: Pieces of the values: where they begin in `values` and in their parameter, and how many they are. What
            lies in no piece may be rounded too.
        seed: From 0 to 2 ** 31 - 1; another one for every rounding of the same elements.
    """
    if values.device.type != "cpu" or not has_library():
        _round_by_torch(values, places, seed)
        return
    for at, first, numel in places:
        round_fp16(values[at : at + numel], first, seed)


def _round_by_torch(values: torch.Tensor, places: Sequence[tuple[int, int, int]], seed: int) -> None:
    bits = values.view(torch.int32)
    numbers = torch.zeros_like(bits)
    for at, first, numel in places:
        torch.arange(first, first + numel, out=numbers[at : at + numel])
    noise = _mixed(numbers.mul_(_GOLDEN).add_(seed)) & _LOW
    rounded = noise.add_(bits).bitwise_and_(~_LOW)
    bits.copy_(torch.where(values.isfinite(), rounded, bits))


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """The last step of MurmurHash3, on 32 bits: each bit of the result depends on each bit of `numbers`."""
    numbers = numbers ^ ((numbers >> 16) & 0xFFFF)
    numbers = numbers * _FIRST
    numbers = numbers ^ ((numbers >> 13) & 0x7FFFF)
    numbers = numbers * _SECOND
    return numbers ^ ((numbers >> 16) & 0xFFFF)
