"""The number that losses are multiplied with in backward, and where it comes in.

[Note: Where the scale comes in]
`engine.backward` and `accelerator.backward` multiply the loss itself, so that nothing of the backward underflows. A
direct `loss.backward()` knows nothing of the scale: there the gradient is multiplied where it enters the model, at the
tensors that its forward returned. These are aliases made for the purpose, so that a path from one output to another
inside the forward does not meet the scale twice. Gradients are divided again in their reduce, where they are
multiplied anyway: in shards there are true gradients only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hf_zero.errors import StateError
from hf_zero.runtime.tree import replace_tensors


class LossScale:
    """Of one engine. Invariant: `value` changes only between windows of accumulation, and is 1 where not in use."""

    def __init__(self) -> None:
        self.value = 1.0
        self.is_used = False  # losses must be scaled, even if by 1
        self.suspects: list[str] | None = (
            None  # parameters whose gradient on this rank was not finite; None: not looked
        )
        self._in_loss = False  # the loss of the backward under way, or next, was multiplied
        self._entered = False  # the scale came in through an output in the backward under way

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the scale, in fp32 at least, for a backward of the caller's own right after this."""
        if not self.is_used:
            return loss
        self._in_loss = True
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.value

    @contextlib.contextmanager
    def scaled(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Gives `scale(loss)`, whose backward is to be called inside."""
        try:
            yield self.scale(loss)
        finally:
            self._in_loss = False

    def end_backward(self) -> None:
        self._in_loss = self._entered = False

    def through_outputs(self, output: Any) -> Any:
        """What the model's forward returned, with every tensor that needs a gradient in an alias that scales it."""
        return replace_tensors(output, self._alias)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        alias = tensor.view_as(tensor)
        alias.register_hook(self._enter)
        return alias

    def _enter(self, grad: torch.Tensor) -> torch.Tensor | None:
        if self._in_loss:
            return None
        self._entered = True
        return grad * self.value

    def check(self, name: str, grad: torch.Tensor) -> None:
        """Look at the gradient that has arrived for parameter `name`. Raises StateError if it was not scaled."""
        if self.suspects is not None and not torch.isfinite(grad).all():
            self.suspects.append(name)
        if self.is_used and not (self._in_loss or self._entered):
            raise StateError(
                f"the gradient of {name} came from a loss that was not scaled for fp16: it was made from something "
                "other than what the model's forward returned.\nCall engine.backward(loss) or "
                "accelerator.backward(loss) instead of loss.backward()."
            )
