"""Blocks of memory that are lent in pieces: what is used again, and when new memory is made."""

from __future__ import annotations

import torch

from hf_zero.native.block_pool import BlockPool

CPU = torch.device("cpu")


def test_the_same_requests_again_need_no_new_block() -> None:
    pool, requests = BlockPool(CPU), [1000, 100, 5000, 64, 1000, 1]
    places = []
    for _ in range(3):
        pieces = [pool.acquire(nbytes) for nbytes in requests]
        assert all(piece.numel() >= nbytes for piece, nbytes in zip(pieces, requests, strict=True))
        assert len({piece.data_ptr() for piece in pieces}) == len(requests), "two of them share memory"
        places.append([piece.data_ptr() for piece in pieces])
        for piece in pieces:
            pool.release(piece)
    assert places[1] == places[0] == places[2]
    assert pool.allocations == len(requests) and pool.live_bytes == 0 < pool.peak_live_bytes


def test_blocks_that_are_too_small_go_before_a_new_one_is_made() -> None:
    pool = BlockPool(CPU)
    small = [pool.acquire(1024) for _ in range(3)]
    pool.release(small[0])
    pool.release(small[2])
    pool.acquire(4096)
    assert [block.numel() for block in pool.blocks] == [1024, 4096]
    assert pool.peak_bytes == pool.nbytes == 5120


def test_one_block_serves_as_many_pieces_as_it_has_place_for() -> None:
    pool = BlockPool(CPU)
    pieces = [pool.acquire(512, block_bytes=2048) for _ in range(4)]
    assert pool.allocations == 1 and not pool.fits([64])
    pool.release(pieces[1])
    pool.release(pieces[2])
    assert pool.fits([1024]) and not pool.fits([512, 1024])
    assert pool.acquire(1024).data_ptr() == pieces[1].data_ptr()


def test_idle_memory_goes_back() -> None:
    pool = BlockPool(CPU)
    used, idle = pool.acquire(64), pool.acquire(64)
    pool.release(idle)
    pool.release_idle()
    assert [block.data_ptr() for block in pool.blocks] == [used.data_ptr()]


def test_a_plan_counts_memory_that_is_not_there() -> None:
    pool = BlockPool(torch.device("meta"))
    for _ in range(2):
        pieces = [pool.acquire(nbytes) for nbytes in (64, 128, 64)]
        assert pool.nbytes == pool.live_bytes == 256 and pool.allocations == 3
        for piece in pieces:
            pool.release(piece)
