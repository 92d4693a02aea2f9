"""Ranks of one attempt of torchrun's agent find each other in a store that has the keys of earlier attempts."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.distributed.restarts import _agreed_name

LIMIT_S = 20.0


def attempt(store: Any, world_size: int, pauses: random.Random) -> list[str]:
    """Return what each rank takes for the attempt's name; the ranks come at different times."""
    names = [""] * world_size

    def come(rank: int, after_s: float) -> None:
        time.sleep(after_s)
        names[rank] = _agreed_name(store, rank, world_size)

    threads = [threading.Thread(target=come, args=(rank, pauses.random() / 5)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return names


@pytest.mark.parametrize("seed", range(3))
def test_an_attempt_has_one_name_and_another_than_the_one_before(seed: int) -> None:
    store, pauses, seen = dist.HashStore(), random.Random(seed), set[str]()
    for world_size in (3, 3, 2, 4, 1, 3):
        names = attempt(store, world_size, pauses)
        assert len(set(names)) == 1 and names[0] and names[0] not in seen, names
        seen.add(names[0])
