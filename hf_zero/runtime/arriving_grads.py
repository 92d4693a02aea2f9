"""The gradients of one flat parameter between autograd and the memory in which they are reduced.

[Note: Waiting gradients]
What a small gradient costs is calls: on a device the launch of a copy, on the host Python and torch's dispatch. So
little is done for a single gradient, and the rest for all of a unit at once. Gradients wait, taken away from
`param.grad`, until all of their flat parameter are there, or MAX_WAITING of them; one with more than LARGE_NUMEL
elements ends the wait: what waits stays small. Nothing waits when a reduce starts, nor when a backward is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_zero.runtime.grad_stand_in import GradStandIn

MAX_WAITING = 16
LARGE_NUMEL = 1 << 20


def do_nothing(*arguments: object) -> None:
    """In the place of what nobody asked for."""


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method of an object that it does not keep.

    Updates that run beside the training refer to the memory of gradients. Through it they must not keep the rest of an
    engine whose model was forgotten: it would take Python's collector another turn to free it.
    """
    mine = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        there = mine()
        if there is not None:
            there(*arguments)

    return call


class ArrivingGrads:
    """Takes gradients from parameters, and hands them on.

    Args:
        params: Of the flat parameter; a gradient is known by its parameter's number here.
        take: Called with gradients by number.
    """

    def __init__(self, params: Sequence[nn.Parameter], take: Callable[[Mapping[int, torch.Tensor]], None]) -> None:
        self._number = len(params)
        self._take = take
        self._numels = [param.numel() for param in params]
        self._waiting: dict[int, torch.Tensor] = {}
        self._arrived: set[int] = set()  # of this backward, without what waits
        self._most = min(self._number, MAX_WAITING)  # that may wait
        self.before_wait: Callable[[], None] = do_nothing  # called when a gradient comes and none waits
        self.on_complete: Callable[[], None] = do_nothing  # when the last one has come

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """For autograd, to call when it has added to the `.grad` of parameter `index`.

        It refers to this object weakly: Python's collector does not see what autograd's hooks refer to, and a model
        that is forgotten without a teardown must be freed with its engine.
        """
        mine = weakref.ref(self)

        def take_grad(param: torch.Tensor) -> None:  # once per parameter and backward: every line here counts
            arriving = mine()
            grad = param.grad
            if arriving is None or grad is None:
                return
            if type(grad) is GradStandIn:  # it stays there
                grad = grad.take_added()
                if grad is None:
                    return
            else:
                param.grad = None
            arriving.receive(index, grad)

        return take_grad

    def receive(self, index: int, grad: torch.Tensor) -> None:
        """A gradient of parameter `index` has come."""
        waiting = self._waiting
        if not waiting:
            self.before_wait()
        elif index in waiting:
            self.hand_on()
        waiting[index] = grad
        if len(waiting) >= self._most or self._numels[index] > LARGE_NUMEL:
            self.hand_on()
            if self.is_complete:
                self.on_complete()

    def hand_on(self) -> None:
        """Hand on what waits."""
        waiting = self._waiting
        if not waiting:
            return
        self._take(waiting)
        self._arrived.update(waiting)
        waiting.clear()
        self._most = min(self._number - len(self._arrived), MAX_WAITING)

    @property
    def is_any(self) -> bool:
        """Some parameter has had its gradient in this backward."""
        return bool(self._waiting or self._arrived)

    @property
    def is_complete(self) -> bool:
        """Every parameter has had its gradient in this backward, and none waits."""
        return len(self._arrived) == self._number

    def end_backward(self) -> None:
        """No more come in this backward."""
        self.hand_on()
        self._arrived.clear()
        self._most = min(self._number, MAX_WAITING)

    def drop(self) -> None:
        """Forget what waits: a pass was broken off, or its gradients are not wanted."""
        if self._waiting or self._arrived:
            self._waiting.clear()
            self.end_backward()
