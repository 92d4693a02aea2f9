"""Forward and backward of one stage for single micro-batches, and what lives between the two."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from hf_zero.distributed.messages import TensorType
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.extras.pipeline.split_backward import SplitBackward, can_split
from hf_zero.runtime.loss_scale import LossScale

Key = tuple[int, int]  # (chunk, micro-batch)


class BadLossError(Exception):
    """The result of the last layer, or of loss_fn, is no loss. The caller adds rank and stage."""


@dataclass
class _Live:
    """A micro-batch between its forward and its backward.

    Of what the forward returned only the graph is kept: the next stage has the values.
    """

    inputs: list[torch.Tensor]  # that a gradient goes to: leaves
    outputs: list[GradientEdge]  # that a gradient comes for
    types: list[TensorType]  # of these
    loss: torch.Tensor | None  # of the last stage; the gradient begins with it


class StagePasses:
    """Runs the chunks of a stage.

    Args:
        module: Called as module(inputs, chunk=c).
        weights: Its leaves that get gradients.
        loss_of: Of the last part of the model: its output and the labels -> the loss, 0-dim.
        feed: Takes the gradient of a weight that autograd did not hand on.
    """

    def __init__(
        self,
        module: PipelineModule,
        loss_scale: LossScale,
        *,
        weights: Callable[[], list[torch.Tensor]],
        loss_of: Callable[[Any, Any], torch.Tensor],
        feed: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._module = module
        self._loss_scale = loss_scale
        self._weights = weights
        self._loss_of = loss_of
        self._feed = feed
        self._first_micro = 0
        self._live: dict[Key, _Live] = {}
        # Micro-batches that wait for the second half of their backward, with their weights.
        self._split: dict[Key, tuple[SplitBackward, list[torch.Tensor]]] = {}
        self.peak_live = 0  # most micro-batches, counted for each chunk, whose activations were held at a time
        self._recomputes = False  # layers compute their activations again in backward, in every half of one

    @property
    def num_live(self) -> int:
        return len(self._live.keys() | self._split.keys())

    def begin_batch(self, first_micro: int) -> None:
        """`first_micro`: the number of its first micro-batch in the run, for layers that are seeded."""
        self._live.clear()
        self._split.clear()
        self.peak_live = 0
        self._first_micro = first_micro

    # ---------------------------------------------------------------- forward
    def forward(self, key: Key, inputs: Any, *, labels: Any = None, is_last: bool = False) -> Any:
        """The output of a chunk; of the last part of the model the loss. Kept for the backward if gradients are on."""
        chunk, micro = key
        self._module.micro_offset = self._first_micro + micro
        given = pytree.tree_map(_past_leaf, inputs) if torch.is_grad_enabled() else inputs
        result = self._module(given, chunk=chunk)
        if is_last:
            result = self._loss_of(result, labels)
        if torch.is_grad_enabled():
            self._keep(key, inputs, result, is_last)
        return result

    def _keep(self, key: Key, inputs: Any, result: Any, is_last: bool) -> None:
        tensors = [one for one in pytree.tree_leaves(result) if _needs_gradient(one)]
        self._live[key] = _Live(
            inputs=[one for one in pytree.tree_leaves(inputs) if _needs_gradient(one)],
            outputs=[get_gradient_edge(tensor) for tensor in tensors],
            types=[(tuple(tensor.shape), tensor.dtype) for tensor in tensors],
            loss=tensors[0] if is_last and tensors else None,
        )
        self.peak_live = max(self.peak_live, self.num_live)

    # ---------------------------------------------------------------- backward
    def expected(self, key: Key) -> list[TensorType] | None:
        """Shapes and types of the gradients that its backward begins with; None if its forward has not been."""
        live = self._live.get(key)
        return None if live is None else [] if live.loss is not None else live.types

    def backward(self, key: Key, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of the inputs that need one. Those of weights go their way."""
        live = self._live.pop(key)
        with self._begun(live, grads) as (outputs, values):
            if outputs:
                torch.autograd.backward(outputs, values)
        return [_taken(one) for one in live.inputs]

    def backward_of_inputs(self, key: Key, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run `backward`, but leave the gradients of weights to `backward_of_weights`.

        Where no stage waits for gradients of inputs there is nothing to be gained, and some graphs cannot be split:
        both come now.
        """
        live = self._live[key]
        if not live.inputs or not (live.outputs or live.loss is not None) or self._recomputes:
            return self.backward(key, grads)
        weights = self._weights()
        ends = live.outputs if live.loss is None else [get_gradient_edge(live.loss)]
        if not can_split(ends, weights, apart_from=_PastLeaf):
            return self.backward(key, grads)
        with self._begun(live, grads) as (outputs, values), _forwards_noticed() as forwards:
            split = SplitBackward(outputs, values, weights)
            found = split.of_inputs(live.inputs)
        self._recomputes = bool(forwards)
        del self._live[key]
        self._split[key] = (split, weights)
        return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(live.inputs, found, strict=True)]

    @torch.no_grad()
    def backward_of_weights(self, key: Key) -> None:
        """The second half of `backward_of_inputs`."""
        split, weights = self._split.pop(key, (None, []))
        if split is None:
            return
        with torch.enable_grad():
            grads = split.of_weights()
        for weight, grad in zip(weights, grads, strict=True):
            if grad is not None:
                self._feed(weight, grad)

    @contextlib.contextmanager
    def _begun(
        self, live: _Live, grads: Sequence[torch.Tensor]
    ) -> Iterator[tuple[list[GradientEdge], list[torch.Tensor]]]:
        """Yield the edges at which a backward begins, and their gradients; the backward runs inside."""
        if live.loss is None:
            with self._loss_scale.received():
                yield live.outputs, list(grads)
            return
        with self._loss_scale.scaled(live.loss) as scaled:
            yield [get_gradient_edge(scaled)], [torch.ones_like(scaled)]


@contextlib.contextmanager
def _forwards_noticed() -> Iterator[list[str]]:
    """Gives a list of the modules that run inside, in a backward: by their classes."""
    found: list[str] = []

    def note(module: nn.Module, args: Any) -> None:
        found.append(type(module).__name__)

    handle = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


class _PastLeaf(torch.autograd.Function):
    """The tensor itself, but no leaf: the first layer of a stage may change it in place, as it may in one process."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _past_leaf(value: Any) -> Any:
    return _PastLeaf.apply(value) if _needs_gradient(value) else value  # type: ignore[no-untyped-call]


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _taken(leaf: torch.Tensor) -> torch.Tensor:
    grad, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if grad is None else grad


def scalar_loss(value: Any) -> torch.Tensor:
    """`value`, if it is one number, with a graph where gradients are on. Raises BadLossError otherwise."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        if torch.is_grad_enabled() and not value.requires_grad:
            raise BadLossError(
                "the loss does not depend on any trainable parameter: expected a tensor that requires a gradient. "
                "Look for detach(), item() or torch.no_grad() in loss_fn and the layers."
            )
        return value.reshape(())
    is_tensor = isinstance(value, torch.Tensor)
    kind = f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
    raise BadLossError(
        f"the loss is {kind}: expected a tensor with one number. Give PipelineModule a loss_fn that returns one, or "
        "let its last layer return the loss."
    )
