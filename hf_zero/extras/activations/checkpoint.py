"""Recompute a function in backward, by torch's checkpointing, with borders that the settings of this process see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hf_zero.extras.activations.regions import replaced


def checkpoint(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, use_reentrant: bool
) -> Any:
    """`function(*args, **kwargs)`, computed again in backward: all it keeps until then are its inputs.

    Tensors in tuples, lists and dicts, and those given by keyword, are inputs too. All else is given as it is.
    """
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))

    def run(*leaves: Any) -> Any:
        given, named = pytree.tree_unflatten(leaves, tree)
        result = function(*given, **named)
        return tuple(result) if isinstance(result, list) else result

    with replaced():
        return torch_checkpoint(run, *leaves, use_reentrant=use_reentrant)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, recomputed in backward; its inputs need no gradient (its parameters do)."""
    return checkpoint(function, args, {}, use_reentrant=False)
