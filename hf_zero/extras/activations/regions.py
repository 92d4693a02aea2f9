"""Checkpointed regions: torch.utils.checkpoint, with something done at their borders.

[Note: How regions are seen]
Models call torch.utils.checkpoint.checkpoint under many names (transformers, remote code, scripts), so it is not
replaced but what it calls: the two functions behind `use_reentrant`. Each runs as it is, inside of two hooks on what
autograd saves: all that is saved there and not by the region's own body are the region's inputs. A region inside of a
region is recomputed with it, and nothing is done at its border; nor inside a backward, or where no graph is made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint

from hf_zero.extras.activations.rng_tracker import TRACKER
from hf_zero.runtime.backward_watch import in_backward, in_transform

_REENTRANT, _NON_REENTRANT = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
# What torch calls; looked up when this is imported, before anything is replaced.
_torch_reentrant: Any = getattr(torch_checkpoint, _REENTRANT)
_torch_non_reentrant: Any = getattr(torch_checkpoint, _NON_REENTRANT)


class Border(Protocol):
    """What is done around one region."""

    keeps_graph: bool  # the region is run as if it was not checkpointed

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Around the region's forward, and the saving of its inputs."""

    def recompute(self, args: Any) -> contextlib.AbstractContextManager[None]:
        """Around its recomputation with these arguments."""


class _Regions(threading.local):
    """Of one thread: whether it is inside of a region's forward."""

    inside = False


_regions = _Regions()
_borders: list[Callable[[Any], Border]] = []  # of those who watch regions; the last one counts
_replaced = 0


def watch(border: Callable[[Any], Border]) -> Callable[[], None]:
    """Put a border around every region that begins from now on, until the returned function is called.

    `border` is given the region's arguments.

    Where several watch, the last one does.
    """
    _borders.append(border)
    undo = contextlib.ExitStack()
    undo.enter_context(replaced())

    def end() -> None:
        if border in _borders:
            _borders.remove(border)
            undo.close()

    return end


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Inside, torch's checkpointing calls this file's functions."""
    global _replaced
    _replaced += 1
    if _replaced == 1:
        setattr(torch_checkpoint, _REENTRANT, _Reentrant)
        setattr(torch_checkpoint, _NON_REENTRANT, _non_reentrant)
    try:
        yield
    finally:
        _replaced -= 1
        if _replaced == 0:
            setattr(torch_checkpoint, _REENTRANT, _torch_reentrant)
            setattr(torch_checkpoint, _NON_REENTRANT, _torch_non_reentrant)


class _Reentrant(_torch_reentrant):  # type: ignore[misc]
    """In the place of torch's function: it has torch's own applied."""

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        border = _border(args)
        if border is None:
            return _torch_reentrant.apply(_recomputed(function, None, forwards=1), preserve_rng_state, *args)
        with border.forward(), _inside():
            if border.keeps_graph:
                return function(*args)
            return _torch_reentrant.apply(_recomputed(function, border, forwards=1), preserve_rng_state, *args)


def _non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
    """In the place of torch's generator, which yields while its caller runs `function`."""
    border = _border((args, kwargs))
    if border is None:
        yield from _torch_non_reentrant(_recomputed(function, None, forwards=0), *args, **kwargs)
        return
    with border.forward(), _inside():
        if border.keeps_graph:
            yield
            return
        yield from _torch_non_reentrant(_recomputed(function, border, forwards=0), *args, **kwargs)


def _border(args: Any) -> Border | None:
    """For a region that begins with these arguments."""
    if not _borders or _regions.inside or not torch.is_grad_enabled() or in_backward() or in_transform():
        return None
    return _borders[-1](args)


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _regions.inside = True
    try:
        yield
    finally:
        _regions.inside = False


def _recomputed(function: Callable[..., Any], border: Border | None, *, forwards: int) -> Callable[..., Any]:
    """`function`, which is recomputed inside the border, with the named random states of its forward.

    Args:
        forwards: How many of its calls come before the recomputations.
    """
    states = TRACKER.get_states()
    if not states and border is None:
        return function
    left = forwards

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            return function(*args, **kwargs)
        at_border = border.recompute((args, kwargs)) if border is not None else contextlib.nullcontext()
        with at_border, TRACKER.with_states(states):
            return function(*args, **kwargs)

    return run
