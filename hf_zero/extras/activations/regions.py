"""Checkpointed regions: torch.utils.checkpoint, with hooks around each of them.

[Note: How regions are seen]
Models call torch.utils.checkpoint.checkpoint under many names (transformers, remote code, scripts), so it is not
replaced but what it calls: the two functions behind `use_reentrant`. Each runs as it is, inside of two hooks on what
autograd saves: all that is saved there and not by the region's own body are the region's inputs. A region inside of a
region is recomputed with it, and it has no hooks of its own; nor inside a backward, or where no graph is made.
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
# The functions of torch, looked up when this is imported, before anything is replaced.
_torch_reentrant: Any = getattr(torch_checkpoint, _REENTRANT)
_torch_non_reentrant: Any = getattr(torch_checkpoint, _NON_REENTRANT)


class RegionHooks(Protocol):
    """Context managers that surround one region."""

    keeps_graph: bool  # the region is run as if it was not checkpointed

    def around_forward(self) -> contextlib.AbstractContextManager[None]:
        """The context of the region's forward, and of the saving of its inputs."""

    def around_recompute(self, args: Any) -> contextlib.AbstractContextManager[None]:
        """The context of its recomputation with these arguments."""


class _Regions(threading.local):
    """The state of one thread: whether it is inside of a region's forward."""

    inside = False


_regions = _Regions()
_watchers: list[Callable[[Any], RegionHooks]] = []  # of those who watch regions; the last one counts
_replaced = 0


def watch(hooks_of: Callable[[Any], RegionHooks]) -> Callable[[], None]:
    """Run `hooks_of(arguments)` around every region that begins from now on, until the returned function is called.

    If several watch, the last one does.
    """
    _watchers.append(hooks_of)
    undo = contextlib.ExitStack()
    undo.enter_context(replaced())

    def end() -> None:
        if hooks_of in _watchers:
            _watchers.remove(hooks_of)
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
    """Replaces torch's function, and applies torch's own inside."""

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        hooks = _hooks_of(args)
        if hooks is None:
            return _torch_reentrant.apply(_recomputed(function, None, forwards=1), preserve_rng_state, *args)
        with hooks.around_forward(), _inside():
            if hooks.keeps_graph:
                return function(*args)
            return _torch_reentrant.apply(_recomputed(function, hooks, forwards=1), preserve_rng_state, *args)


def _non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
    """Replaces torch's generator, which yields while its caller runs `function`."""
    hooks = _hooks_of((args, kwargs))
    if hooks is None:
        yield from _torch_non_reentrant(_recomputed(function, None, forwards=0), *args, **kwargs)
        return
    with hooks.around_forward(), _inside():
        if hooks.keeps_graph:
            yield
            return
        yield from _torch_non_reentrant(_recomputed(function, hooks, forwards=0), *args, **kwargs)


def _hooks_of(args: Any) -> RegionHooks | None:
    """The hooks of a region that begins with these arguments; None if nothing is done around it."""
    if not _watchers or _regions.inside or not torch.is_grad_enabled() or in_backward() or in_transform():
        return None
    return _watchers[-1](args)


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    _regions.inside = True
    try:
        yield
    finally:
        _regions.inside = False


def _recomputed(function: Callable[..., Any], hooks: RegionHooks | None, *, forwards: int) -> Callable[..., Any]:
    """Wrap `function`: it is recomputed inside the hooks, with the named random states of its forward.

    Args:
        forwards: How many of its calls come before the recomputations.
    """
    states = TRACKER.get_states()
    if not states and hooks is None:
        return function
    left = forwards

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            return function(*args, **kwargs)
        around = hooks.around_recompute((args, kwargs)) if hooks is not None else contextlib.nullcontext()
        with around, TRACKER.with_states(states):
            return function(*args, **kwargs)

    return run
