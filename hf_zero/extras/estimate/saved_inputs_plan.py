"""The activation_checkpointing block in a plan: where saved inputs of checkpointed regions go, and what a budget does.

A forward and backward on meta tensors runs inside of the same borders as a training. What is placed elsewhere is let
go of in forward, and comes back as a new tensor in backward, so that the plan's count of live bytes is that of a run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.config.resolved import ActivationCheckpointing
from hf_zero.extras.activations.budget import Budget, Choice, RegionBytes, bytes_of, choose, least, tensors_in

_BLOCK = "activation_checkpointing"


@dataclass(frozen=True)
class SavedInputsPlan:
    """The effect of the block on a micro-batch: bytes on the host, and notes."""

    num_regions: int
    host: int = 0
    notes: tuple[str, ...] = ()  # for people


class PlannedCheckpointing:
    """The stand-in for activations.active.Checkpointing whose tensors have sizes only.

    Args:
        choices: What becomes of each region, by its number; none: what the settings say.
    """

    def __init__(
        self, settings: ActivationCheckpointing, *, on_host: bool, choices: Sequence[Choice] | None = None
    ) -> None:
        self._settings = settings
        self._choices = choices
        self._on_host = on_host
        self._places_all = settings.cpu_checkpointing and not on_host
        self._measured = Budget(1, rank=1, can_offload=False)  # of no limit: it only measures
        self._inputs: list[int] = []
        self._placed: dict[tuple[Any, ...], StorageWeakRef] = {}
        self._placed_bytes = 0

    def hooks_of(self, args: Any) -> _RegionHooks:
        number = len(self._inputs)
        self._inputs.append(bytes_of(tensors_in(args)))
        self._measured.choice(number, args)
        choice = None if self._choices is None else self._choices[number]
        places = self._places_all if choice is None else choice is Choice.OFFLOAD
        return _RegionHooks(self, number, places_inputs=places, keeps_graph=choice is Choice.KEEP)

    def measure(self, number: int, args: Any) -> contextlib.AbstractContextManager[None]:
        """Measure a region, where a budget asks for it: what is measured stays alive a while and raises the peak."""
        if self._settings.activation_memory is None or self._choices is not None:
            return contextlib.nullcontext()
        return self._measured.measure(number, args)

    def region_sizes(self) -> list[RegionBytes]:
        """Return the sizes of all regions, once the backward is over."""
        bodies = self._measured.measured_bodies()
        return [RegionBytes(inputs, bodies.get(number, 0)) for number, inputs in enumerate(self._inputs)]

    def pack(self, tensor: torch.Tensor) -> Any:
        if not tensor.is_floating_point() or isinstance(tensor._base, torch.nn.Parameter):
            return tensor
        if isinstance(tensor, torch.nn.Parameter) or not tensor.numel():
            return tensor
        # An input of several regions is placed once. A storage that is gone may have left its address to another.
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)
        if key not in self._placed or self._placed[key].expired():
            self._placed[key] = StorageWeakRef(tensor.untyped_storage())
            self._placed_bytes += tensor.nbytes
        return functools.partial(
            torch.empty_strided, tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved()

    def result(self) -> SavedInputsPlan:
        notes = _notes(self._settings, len(self._inputs), on_host=self._on_host)
        return SavedInputsPlan(len(self._inputs), self._placed_bytes, tuple(notes))


class _RegionHooks:
    """The hooks of one region; see regions.RegionHooks."""

    def __init__(self, plan: PlannedCheckpointing, number: int, *, places_inputs: bool, keeps_graph: bool) -> None:
        self._plan, self._number, self._places_inputs = plan, number, places_inputs
        self.keeps_graph = keeps_graph

    @contextlib.contextmanager
    def around_forward(self) -> Iterator[None]:
        if not self._places_inputs:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._plan.pack, self._plan.unpack):
            yield

    def around_recompute(self, args: Any) -> contextlib.AbstractContextManager[None]:
        return self._plan.measure(self._number, args)


def choices_of(sizes: Sequence[RegionBytes], limit: int, *, on_host: bool) -> tuple[list[Choice] | None, str]:
    """Return what a budget of `limit` bytes does with regions of these sizes, and a line for people."""
    choices = choose(sizes, limit, can_offload=not on_host)
    if choices is None:
        smallest = least(sizes, can_offload=not on_host)
        return None, f"{_BLOCK}.activation_memory = {limit} bytes cannot be met: {smallest} bytes are the least"
    kept, offloaded = choices.count(Choice.KEEP), choices.count(Choice.OFFLOAD)
    return choices, (
        f"{_BLOCK}.activation_memory: of {len(choices)} checkpointed regions {kept} keep their graph, "
        f"{len(choices) - kept} are recomputed, {offloaded} of these with inputs on the host"
    )


def _notes(settings: ActivationCheckpointing, number: int, *, on_host: bool) -> Iterator[str]:
    if not number:
        yield f"{_BLOCK}: the forward has no checkpointed regions (--gradient-checkpointing makes layers such)"
        return
    if settings.partition_activations:
        yield (
            f"{_BLOCK}.partition_activations: which ranks share inputs is not in the configuration; planned is the "
            "whole of them on every rank. N ranks that share them keep 1/N each"
        )
    if settings.cpu_checkpointing and on_host:
        yield f"{_BLOCK}.cpu_checkpointing has no effect: the device is the CPU"
