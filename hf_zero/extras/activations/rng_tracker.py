"""Named states of the random number generator, as tensor parallelism keeps them: DeepSpeed's tracker, and Megatron's.

The generator is that of the device that computes: the accelerator, or the CPU where there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hf_zero.distributed.processes import default_device
from hf_zero.errors import StateError

MODEL_PARALLEL = "model-parallel-rng"
_OFFSET = 2718  # DeepSpeed's, from Megatron


class RNGStates:
    """States by name. `fork(name)` computes with one of them, which goes on there the next time."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a state. Raises StateError for a name or a seed that is there already."""
        if seed in self._seeds or name in self._states:
            what = f"the seed {seed}" if seed in self._seeds else f"a state named {name!r}"
            raise StateError(f"there is {what} already: choose another one, or call get_cuda_rng_tracker().reset()")
        self._seeds.add(seed)
        before = _get_state()
        manual_seed(seed)
        self._states[name] = _get_state()
        _set_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, random numbers are those of the state `name`; afterwards those of before go on."""
        if name not in self._states:
            raise StateError(f"there is no state named {name!r}: call model_parallel_cuda_manual_seed(seed) before")
        before = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(before)

    @contextlib.contextmanager
    def with_states(self, states: dict[str, torch.Tensor]) -> Iterator[None]:
        """Inside, the states are those given: a recomputation draws what its forward drew."""
        before = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(before)


TRACKER = RNGStates()


def seed_model_parallel(seed: int, rank: int) -> None:
    """`seed` for what all ranks of a tensor-parallel group compute alike, and a state of each rank's own for the rest.

    Args:
        rank: In the tensor-parallel group.
    """
    TRACKER.reset()
    manual_seed(seed)
    TRACKER.add(MODEL_PARALLEL, seed + _OFFSET + rank)


def reseed_model_parallel(seed: int, rank: int) -> None:
    """Seed the rank's own state alone, as `seed_model_parallel` does."""
    with TRACKER.fork():
        manual_seed(seed + _OFFSET + rank)


def manual_seed(seed: int) -> None:
    """Seed the generator of the device that computes."""
    device = default_device()
    if device.type == "cpu":
        torch.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


def _get_state() -> torch.Tensor:
    device = default_device()
    state: torch.Tensor = (torch if device.type == "cpu" else torch.get_device_module(device)).get_rng_state()
    return state


def _set_state(state: torch.Tensor) -> None:
    device = default_device()
    (torch if device.type == "cpu" else torch.get_device_module(device)).set_rng_state(state)
