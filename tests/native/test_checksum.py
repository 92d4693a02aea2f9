"""The native checksum is zlib's, for every length and alignment, with and without a copy."""

from __future__ import annotations

import random
import zlib

import pytest
import torch

from hf_zero.native.checksum import AUTO, BY_TABLES, crc32, crc32_of_bytes


@pytest.mark.parametrize("simd", [AUTO, BY_TABLES])
def test_it_is_that_of_zlib(simd: int) -> None:
    rng = random.Random(simd)
    for nbytes in (*range(200), *(rng.randrange(1 << 17) for _ in range(40))):
        start, place, before = rng.randrange(64), rng.randrange(64), rng.randrange(1 << 32)
        data = torch.randint(0, 256, (start + nbytes,), dtype=torch.uint8)[start:]
        wanted = zlib.crc32(data.numpy().data, before)
        memory = torch.full((place + nbytes + 64,), 7, dtype=torch.uint8)
        assert crc32(data, before, simd=simd) == wanted, nbytes
        assert crc32(data, before, copy_to=memory[place : place + nbytes], simd=simd) == wanted, nbytes
        assert torch.equal(memory[place : place + nbytes], data)
        assert (memory[:place] == 7).all() and (memory[place + nbytes :] == 7).all(), "it wrote beside"
        if nbytes:
            assert crc32_of_bytes(data.numpy().data, before) == wanted


def test_what_cannot_be_read_in_one_piece_is_refused() -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        crc32(torch.zeros(8)[::2])
    with pytest.raises(AssertionError, match="32 bytes into 16"):
        crc32(torch.zeros(8), copy_to=torch.zeros(4))
