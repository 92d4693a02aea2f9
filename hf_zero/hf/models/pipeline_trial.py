"""Runs the parts that a model was taken apart into beside the model, without its weights: they are to do the same.

What a model does around its layers is found by running it, and a model may do what nobody has thought of. So a
difference is an error when a pipeline is made, and never a training that differs from the model's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_zero.errors import ConfigError
from hf_zero.hf.models.pipeline_layers import Anatomy, Calls, Embeddings, Head, LayerCall, run_shell

_TOLERANCE = 1e-5


def _logits(hidden: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """In the place of the output embeddings, which may be large: depends on the hidden states."""
    return torch.tanh(hidden.mean(-1, keepdim=True)) * torch.linspace(-1, 1, vocab_size) + hidden[..., :1]


def check_parts(anatomy: Anatomy, *, has_loss_fn: bool) -> None:
    """Raise ConfigError where embeddings, layers' arguments, logits or the loss are not the model's own.

    Args:
        has_loss_fn: The model's own loss does not count.
    """
    other = anatomy.weightless()
    model: Any = other.model
    vocab_size = model.config.get_text_config().vocab_size
    model.get_output_embeddings().forward = functools.partial(_logits, vocab_size=vocab_size)
    ids = torch.arange(6).view(2, 3) % vocab_size
    padded = torch.tensor([[1, 1, 1], [0, 1, 1]])
    try:
        with torch.no_grad():
            parts = Embeddings(other).eval(), Calls(other), Head(other).eval()
            for mask in (None, padded):
                _compare(other, parts, ids, mask)
            own_loss = None if has_loss_fn else _own_loss(other, ids, vocab_size)
    except ConfigError:
        raise
    except Exception as error:
        raise anatomy.refused(f"its parts do not run by themselves ({type(error).__name__}: {error})") from error
    if own_loss is not None:
        raise anatomy.refused(f"{own_loss}. Give from_transformers a loss_fn of logits and labels")


def _compare(other: Anatomy, parts: tuple[Embeddings, Calls, Head], ids: torch.Tensor, mask: Any) -> None:
    embeddings, calls, head = parts
    given: list[LayerCall] = []

    def on_call(index: int, call: LayerCall) -> Any:
        given.append(call)
        return (call.hidden,) if other.returns_tuple else call.hidden

    want = run_shell(other.model, on_call, input_ids=ids, attention_mask=mask).logits
    flow = embeddings((ids, mask, None))
    if not _equal(flow[0], given[0].hidden):
        raise other.refused("its first layer is given other hidden states than a pipeline's")
    for index, call in enumerate(given):
        mine = calls.of(index, flow, training=False)
        if not _equal((mine.args, _set(mine.kwargs)), (call.args, _set(call.kwargs))):
            raise other.refused(f"its layer {index} is given something else than a pipeline's")
    if not _equal(head(flow), want):
        raise other.refused("its logits depend on more than what its last layer returns")


def _set(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without switches that are off: a causal model hands its base model some that would be off anyway."""
    return {name: value for name, value in kwargs.items() if value is not None and value is not False}


def _own_loss(other: Anatomy, ids: torch.Tensor, vocab_size: int) -> str | None:
    """What is different about the model's loss; None if it is that of the next token."""

    def on_call(index: int, call: LayerCall) -> Any:
        return (call.hidden,) if other.returns_tuple else call.hidden

    labels = ids.clone()
    labels[0, 1] = -100
    try:
        output = run_shell(other.model, on_call, input_ids=ids, labels=labels)
    except TypeError:
        return "it takes no labels"
    want = ForCausalLMLoss(output.logits, labels, vocab_size=vocab_size)
    return None if _equal(output.loss, want) else "its loss is not that of the next token"


def _equal(mine: Any, its: Any) -> bool:
    (leaves, tree), (others, other_tree) = pytree.tree_flatten(mine), pytree.tree_flatten(its)
    return tree == other_tree and all(_equal_leaf(one, another) for one, another in zip(leaves, others, strict=True))


def _equal_leaf(one: Any, another: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(another, torch.Tensor):
        return type(one) is type(another) and (one is another or not isinstance(one, int | float) or one == another)
    return one.shape == another.shape and torch.allclose(
        one.double(), another.double(), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
    )
