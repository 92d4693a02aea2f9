"""The activation checkpointing of this process: which settings hold, and what they do at the border of a region.

One at a time holds, as in DeepSpeed: that of the engine or of the call of `configure` that came last.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.config.resolved import ActivationCheckpointing
from hf_zero.distributed.input_group import InputGroup
from hf_zero.extras.activations import regions
from hf_zero.extras.activations.budget import Budget, Choice, tensors_in
from hf_zero.extras.activations.saved_inputs import USAGE, SavedInputs, SavedRegion
from hf_zero.extras.monitors.clocks import Clock, clock_of
from hf_zero.logs import log_line

_BLOCK = "activation_checkpointing"

logger = logging.getLogger(__name__)


class RegionTimes:
    """Logs the times of the forward and the recomputation of every region, on rank 0. It waits for no device."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unread: collections.deque[tuple[str, Any, Any]] = collections.deque()

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        start = self._clock.mark()
        try:
            yield
        finally:
            self._unread.append((what, start, self._clock.mark()))
            while self._unread and self._clock.is_past(self._unread[0][2]):
                self._log()

    def finish(self) -> None:
        """Log what is left. Waits for the device."""
        while self._unread:
            self._log()

    def _log(self) -> None:
        what, start, end = self._unread.popleft()
        log_line(f"{_BLOCK}: {what}: {self._clock.ms(start, end):.3f} ms")


class Checkpointing:
    """Applies one set of settings to regions, as they begin and end."""

    def __init__(self, settings: ActivationCheckpointing, device: torch.device, rank: int, group: Any) -> None:
        self.settings = settings
        self._device = device
        inputs = InputGroup(group) if group is not None and dist.get_world_size(group) > 1 else None
        self.budget = _budget_of(settings, device, rank)
        self.saved = SavedInputs(_of_inputs(settings), device, rank, inputs)
        self._times = RegionTimes(clock_of(device)) if settings.profile and rank == 0 else None
        self._next = 0  # number of the next region in this forward
        self.has_met_any = False  # region, so far
        self._waiting: weakref.WeakSet[_Mark] = weakref.WeakSet()  # of the regions whose backward is to come
        if rank == 0:
            for line in _without_effect(settings, device, inputs):
                logger.warning("%s", line)

    def hooks_of(self, args: Any) -> _RegionHooks:
        """The hooks of a region that begins with these arguments."""
        self.has_met_any = True
        if not self._in_forward():
            self._next = 0
        number, self._next = self._next, self._next + 1
        if self.budget is None:
            return _RegionHooks(self, number, places_inputs=self.saved.places_anything)
        choice = self.budget.choice(number, args)
        self._note_backward(tensors_in(args))
        return _RegionHooks(
            self,
            number,
            places_inputs=choice is Choice.OFFLOAD,
            keeps_graph=choice is Choice.KEEP,
            measure=functools.partial(self.budget.measure, number),
        )

    def _in_forward(self) -> bool:
        """Whether regions of a forward are waiting for their backward; where it cannot be known, it seems so."""
        if self.budget is not None:
            return bool(self._waiting)
        return bool(self.saved.num_live) or not self.saved.places_anything

    def _note_backward(self, inputs: list[torch.Tensor]) -> None:
        """Learn from an input when backward has come to the region, which may never be recomputed."""
        mark = _Mark()
        self._waiting.add(mark)

        def arrived(grad: torch.Tensor) -> None:
            self._waiting.discard(mark)
            self.recomputes()

        for tensor in inputs:
            if tensor.requires_grad:
                tensor.register_hook(arrived)  # lives as long as the graph
                return

    @contextlib.contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """Measure and, if asked for, synchronize a region's forward or its recomputation."""
        self._synchronize()
        with self._times.measure(what) if self._times is not None else contextlib.nullcontext():
            try:
                yield
            finally:
                self._synchronize()

    def recomputes(self) -> None:
        """Backward has begun: the next region is the first one of a forward."""
        self._next = 0

    def finish(self) -> None:
        self.saved.release_idle()
        if self._times is not None:
            self._times.finish()

    def _synchronize(self) -> None:
        if self.settings.synchronize_checkpoint_boundary and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


class _Mark:
    """Stands for a region as long as its graph is there."""


class _RegionHooks:
    """The hooks of one region; see regions.RegionHooks."""

    def __init__(
        self,
        checkpointing: Checkpointing,
        number: int,
        *,
        places_inputs: bool,
        keeps_graph: bool = False,
        measure: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._checkpointing = checkpointing
        self._number = number
        self._places_inputs = places_inputs
        self._measure = measure
        self.keeps_graph = keeps_graph

    @contextlib.contextmanager
    def around_forward(self) -> Iterator[None]:
        with self._checkpointing.at_work(f"region {self._number}, forward"):
            if not self._places_inputs:
                yield
                return
            saved = self._checkpointing.saved
            with _hooks(saved, saved.begin_region(self._number)):
                yield

    @contextlib.contextmanager
    def around_recompute(self, args: Any) -> Iterator[None]:
        self._checkpointing.recomputes()
        with self._checkpointing.at_work(f"region {self._number}, recomputation"), self._measure(args):
            yield


def _hooks(saved: SavedInputs, region: SavedRegion) -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(functools.partial(saved.pack, region=region), saved.unpack)


def _budget_of(settings: ActivationCheckpointing, device: torch.device, rank: int) -> Budget | None:
    if settings.activation_memory is None:
        return None
    return Budget(settings.activation_memory, rank, can_offload=device.type != "cpu")


def _of_inputs(settings: ActivationCheckpointing) -> ActivationCheckpointing:
    """Let inputs go to the host if there is a budget, which then decides for each region."""
    return settings if settings.activation_memory is None else dataclasses.replace(settings, cpu_checkpointing=True)


def _without_effect(
    settings: ActivationCheckpointing, device: torch.device, group: InputGroup | None
) -> Iterator[str]:
    if settings.partition_activations and group is None:
        yield (
            f"{_BLOCK}.partition_activations = true has no effect: no group of ranks is known to share the inputs of "
            "checkpointed regions (hf_zero.checkpointing.configure(mpu) names one)"
        )
    if settings.cpu_checkpointing and device.type == "cpu":
        yield f"{_BLOCK}.cpu_checkpointing = true has no effect: the device is the CPU, so inputs are in host memory"


_stack: list[Checkpointing] = []  # the last one holds
_group: Any = None  # that `configure` has named; engines that are made later keep it


def current() -> Checkpointing | None:
    """The settings in force; None if regions are left to torch."""
    return _stack[-1] if _stack else None


def usage() -> dict[str, int]:
    """The usage of the settings in force; see SavedInputs.usage."""
    return dict.fromkeys(USAGE, 0) if (now := current()) is None else now.saved.usage()


def use(settings: ActivationCheckpointing, device: torch.device, rank: int) -> Callable[[], None]:
    """Apply `settings` to every region of this process from now on, until the returned function is called.

    If several were asked for, the last ones hold.
    """
    mine = Checkpointing(settings, device, rank, _group)
    _stack.append(mine)
    unwatch = regions.watch(mine.hooks_of)

    def end() -> None:
        if mine in _stack:
            _stack.remove(mine)
            unwatch()
            mine.finish()

    return end


def tell_no_region(model: torch.nn.Module) -> Callable[[], None]:
    """Warn where the first training forward of `model` checkpoints nothing; call what is returned to stop that."""
    mine = current()

    def look(*call: Any) -> None:
        if torch.is_grad_enabled():
            handle.remove()
            if mine is not None and not mine.has_met_any:
                logger.warning(
                    "%s has no effect: nothing in the model's forward was checkpointed "
                    "(activation_checkpointing_enable does it, or torch.utils.checkpoint or "
                    "hf_zero.checkpointing.checkpoint in the model's code)",
                    _BLOCK,
                )

    handle = model.register_forward_hook(look)
    return handle.remove


def share_inputs(group: Any) -> None:
    """Let the ranks of `group` share the inputs of their regions, from the next `use` on; None: none do."""
    global _group
    _group = group
