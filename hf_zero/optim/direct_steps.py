"""Steps of the optimizer that a user has given away: it holds shards without gradients now, and would do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hf_zero.errors import StateError


class DirectSteps:
    """Refuses `optimizer.step()` outside of `allowed`, until `remove`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_allowed = False
        self._handle = optimizer.register_step_pre_hook(self._check)

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_allowed:
            raise StateError(
                f"step() was called on the {type(optimizer).__name__} that was handed to hf_zero: it holds this rank's"
                " shards, and no gradients.\nCall engine.step(), or step() of the optimizer that hf_zero.initialize "
                "or accelerator.prepare returned; zero_grad() likewise."
            )

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False

    def remove(self) -> None:
        self._handle.remove()
