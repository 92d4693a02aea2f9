"""The random number generators of this process: Python's, numpy's and torch's, seeded and kept together."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from hf_zero.distributed.processes import default_device

_NUMPY_SEEDS = 1 << 32


def seed_all(seed: int) -> None:
    """Seed all of them, on all devices."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Afterwards random numbers go on as if none had been drawn inside."""
    device = default_device()
    python, numpy = random.getstate(), np.random.get_state()
    # The CPU's generator is kept with either.
    kept = (
        torch.random.fork_rng([]) if device.type == "cpu" else torch.random.fork_rng([device], device_type=device.type)
    )
    try:
        with kept:
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
