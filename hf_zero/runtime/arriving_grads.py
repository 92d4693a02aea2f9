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

import torch
from torch import nn

from hf_zero.runtime.backward_watch import BackwardWatch
from hf_zero.runtime.grad_stand_in import GradStandIn

MAX_WAITING = 16
LARGE_NUMEL = 1 << 20


class ArrivingGrads:
    """Takes gradients from parameters, and adds them where they are reduced: see `take`.

    Args:
        params: The parameters of a flat parameter; a gradient is known by its parameter's number here.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._number = len(params)
        self._numels = [param.numel() for param in params]
        self._waiting: dict[int, torch.Tensor] = {}
        self._arrived: set[int] = set()  # the numbers of this backward, without what waits
        self._most_waiting = min(self._number, MAX_WAITING)
        # It hears of gradients. The reference is weak: an update that runs beside the training holds accumulators, and
        # must not keep the rest of an engine whose model was forgotten.
        self.watch: Callable[[], BackwardWatch | None] = no_watch

    def take(self, grads: Mapping[int, torch.Tensor]) -> None:
        """Add gradients that have come, by the number of their parameter."""
        raise NotImplementedError

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """The function that autograd calls when it has added to the `.grad` of parameter `index`.

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
        """Let a gradient of parameter `index` wait, and take what waits where that is enough."""
        waiting = self._waiting
        if not waiting:
            if (watch := self.watch()) is not None:
                watch.gradient_arrived()
        elif index in waiting:
            self.take_waiting()
        waiting[index] = grad
        if len(waiting) >= self._most_waiting or self._numels[index] > LARGE_NUMEL:
            self.take_waiting()
            if self.is_complete and (watch := self.watch()) is not None:
                watch.gradients_complete()

    def take_waiting(self) -> None:
        """Take the gradients that wait."""
        waiting = self._waiting
        if not waiting:
            return
        self.take(waiting)
        self._arrived.update(waiting)
        waiting.clear()
        self._most_waiting = min(self._number - len(self._arrived), MAX_WAITING)

    @property
    def has_arrivals(self) -> bool:
        """Whether some parameter has had its gradient in this backward."""
        return bool(self._waiting or self._arrived)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has had its gradient in this backward, and none waits."""
        return len(self._arrived) == self._number

    def end_backward(self) -> None:
        """Take what waits: no more gradients come in this backward."""
        self.take_waiting()
        self._arrived.clear()
        self._most_waiting = min(self._number, MAX_WAITING)

    def drop_waiting(self) -> None:
        """Forget what waits: a pass was broken off, or its gradients are not wanted."""
        if self._waiting or self._arrived:
            self._waiting.clear()
            self.end_backward()


def no_watch() -> None:
    """Return no watch: nobody hears of gradients."""
