"""Where one parameter's gradient goes when autograd has made it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.reduce_schedule import GradReducer


class Arrival:
    """Hands the gradients of one parameter to the reducer.

    By weak references: Python's collector does not see the hooks that autograd keeps, and a model that is forgotten
    without a teardown must be freed with its engine.

    Args:
        boundary: Says whether the micro-batch under way is the last one before the update.
    """

    def __init__(
        self,
        reducer: GradReducer,
        buffer: GradAccumulator,
        index: int,
        boundary: weakref.WeakMethod[Callable[[], bool]],
    ) -> None:
        self._reducer = weakref.ref(reducer)
        self._buffer = weakref.ref(buffer)
        self._index = index
        self._boundary = boundary

    def __call__(self, grad: torch.Tensor) -> None:
        reducer, buffer, boundary = self._reducer(), self._buffer(), self._boundary()
        if reducer is not None and buffer is not None and boundary is not None:
            reducer.arrived(buffer, self._index, grad, boundary=boundary())
