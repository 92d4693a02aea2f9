"""The number that losses are multiplied with in backward, and where it comes in.

[Note: Where the scale comes in]
`engine.backward` and `accelerator.backward` multiply the loss itself, so that nothing of the backward underflows. A
direct `loss.backward()` knows nothing of the scale: there the gradient is multiplied where it enters the model, at the
tensors that its forward returned, and divided where it leaves the model, at its inputs: another model before it has a
scale of its own, or none. These tensors are aliases made for the purpose, so that a path from one output to another
inside the forward does not meet the scale twice. Gradients are divided again in their reduce, where they are
multiplied anyway: in shards there are true gradients only.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_zero.errors import StateError
from hf_zero.layout import Slot
from hf_zero.runtime.nested import map_tensors, replace_tensors

# The scale that the loss of the backward under way, or next, was multiplied with.
_CLAIMED: list[weakref.ref[LossScale]] = []


def _claimant() -> LossScale | None:
    return _CLAIMED[0]() if _CLAIMED else None


def _claim(scale: LossScale | None) -> None:
    _CLAIMED[:] = [] if scale is None else [weakref.ref(scale)]


class LossScale:
    """The loss scale of one engine.

    Invariant: `value` changes only between windows of accumulation, and is 1 where not in use.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self.is_used = False  # losses must be scaled, even if by 1
        # Parameters whose gradient on this rank was not finite; None: not looked.
        self.suspects: list[str] | None = None
        self._in_loss = False  # the loss of the backward under way, or next, was multiplied
        self._entered = False  # the scale came in through an output in the backward under way

    def __call__(self) -> float:
        """Return the scale, to programs that call `engine.loss_scale()` of DeepSpeed."""
        return self.value

    def multiply(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the scale, in fp32 at least."""
        if not self.is_used:
            return loss
        scaled = loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.value
        if scaled.requires_grad:
            scaled.register_hook(self._note_in_loss)
        return scaled

    def _note_in_loss(self, grad: torch.Tensor) -> None:
        """Take note that a backward began at a loss that was multiplied."""
        self._in_loss = True
        _claim(self)

    @contextlib.contextmanager
    def scaled(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Gives `loss` times the scale, in fp32 at least: its backward is to be called inside."""
        try:
            yield self.multiply(loss)
        finally:
            self.end_backward()

    @contextlib.contextmanager
    def received(self) -> Iterator[None]:
        """Inside, backwards start from gradients of a loss that was multiplied elsewhere, with the same scale."""
        self._in_loss = True
        try:
            yield
        finally:
            self.end_backward()

    def end_backward(self) -> None:
        self._in_loss = self._entered = False
        if _claimant() is self:
            _claim(None)

    def forget(self) -> None:
        """A pass was broken off."""
        self.end_backward()
        if self.suspects is not None:
            self.suspects = []

    def through_outputs(self, output: Any) -> Any:
        """Return the output of the model's forward, every tensor that needs a gradient as an alias that scales it."""
        return replace_tensors(output, lambda tensor: _alias(tensor, self._enter))

    def through_inputs(self, inputs: Any) -> Any:
        """Return the input of the model's forward, every tensor that needs a gradient as an alias that unscales it."""
        return map_tensors(inputs, lambda tensor: _alias(tensor, self._leave))

    def _enter(self, grad: torch.Tensor) -> torch.Tensor | None:
        if self._in_loss:
            return None
        self._entered = True
        return grad * self.value

    def _leave(self, grad: torch.Tensor) -> torch.Tensor | None:
        return None if self._in_loss else grad / self.value

    def check(self, slots: Sequence[Slot], grads: Mapping[int, torch.Tensor]) -> None:
        """Look at gradients that have arrived, by the number of their parameter in `slots`.

        Raises StateError if they were not scaled.
        """
        if self.suspects is not None:
            self.suspects += [slots[index].name for index, grad in grads.items() if not torch.isfinite(grad).all()]
        if not _CLAIMED and not self.is_used:
            return
        told = f"the gradient of {slots[next(iter(grads))].name}"
        if _claimant() not in (None, self):
            raise StateError(
                f"{told} came from a loss that was scaled for the fp16 of another engine.\nCall backward once for the "
                "loss of each engine, or loss.backward() for both together."
            )
        if self.is_used and not (self._in_loss or self._entered):
            raise StateError(
                f"{told} came from a loss that was not scaled for fp16: it was made from something other than what "
                "the model's forward returned.\nCall engine.backward(loss) or accelerator.backward(loss) instead of "
                "loss.backward()."
            )


def _alias(tensor: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    alias = tensor.view_as(tensor)
    alias.register_hook(hook)
    return alias
