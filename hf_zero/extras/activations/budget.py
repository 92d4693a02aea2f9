"""A budget for what checkpointed regions keep: it chooses which are recomputed, and whose inputs go to the host.

[Note: The budget]
What a region's inputs and its graph take is measured in the first forward and backward, in which all are recomputed:
the graph when it is there again, one region at a time. From then on as many regions keep their graph as fit, beginning
with the last one: backward frees it first, so it is in nobody's way, and that of the very last one is made again at
once anyhow. Where not even all inputs fit, those of the first regions, which wait longest, go to the host. A batch
with larger inputs than those measured is measured anew. Values do not depend on any of it.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_zero.errors import ConfigError

logger = logging.getLogger(__name__)

_KEY = "activation_checkpointing.activation_memory"
_GB = 1e9


class Choice(enum.Enum):
    """The ways to treat a region between its forward and its backward."""

    KEEP = "keeps its graph"
    RECOMPUTE = "keeps its inputs"
    OFFLOAD = "has its inputs on the host"


@dataclass(frozen=True)
class RegionBytes:
    """The bytes that backward needs of a region: its inputs, and the rest of its graph without parameters."""

    inputs: int
    body: int

    def held(self, choice: Choice) -> int:
        """The bytes that stay on the device from its forward to its backward."""
        return {Choice.KEEP: self.inputs + self.body, Choice.RECOMPUTE: self.inputs, Choice.OFFLOAD: 0}[choice]


def peak_of(sizes: Sequence[RegionBytes], choices: Sequence[Choice]) -> int:
    """The most that is on the device at a time: in the backward of a region it is whole, and those before it wait.

    Inputs that come from the host come one region ahead.
    """
    peak = before = 0
    ahead = 0
    for size, choice in zip(sizes, choices, strict=True):
        peak = max(peak, before + size.inputs + size.body + ahead)
        before += size.held(choice)
        ahead = size.inputs if choice is Choice.OFFLOAD else 0
    return peak


def choose(sizes: Sequence[RegionBytes], limit: int, *, can_offload: bool) -> list[Choice] | None:
    """The fewest recomputations within `limit` bytes, and the fewest copies to the host; None: there is no way."""
    choices = [Choice.RECOMPUTE] * len(sizes)
    for number in range(len(sizes)):
        if peak_of(sizes, choices) <= limit:
            break
        if not can_offload:
            return None
        choices[number] = Choice.OFFLOAD
    if peak_of(sizes, choices) > limit:
        return None
    for number in reversed(range(len(sizes))):
        kept = [*choices[:number], *[Choice.KEEP] * (len(sizes) - number)]
        if peak_of(sizes, kept) > limit:
            break
        choices = kept
    return choices


def least(sizes: Sequence[RegionBytes], *, can_offload: bool) -> int:
    """The smallest budget that can be met, in bytes."""
    plain = peak_of(sizes, [Choice.RECOMPUTE] * len(sizes))
    return min(plain, peak_of(sizes, [Choice.OFFLOAD] * len(sizes))) if can_offload else plain


class Budget:
    """Measures the regions of a process, and says what becomes of each.

    Args:
        can_offload: There is a device, whose memory is not the host's.
    """

    def __init__(self, limit: int, rank: int, *, can_offload: bool) -> None:
        self.limit = limit
        self._rank = rank
        self._can_offload = can_offload
        self.sizes: list[RegionBytes] = []  # of the largest batch so far
        self.choices: list[Choice] = []  # empty while all are recomputed and measured
        self._inputs: dict[int, int] = {}  # of the regions of this forward
        self._bodies: dict[int, int] = {}

    def choice(self, number: int, args: Any) -> Choice:
        """The choice for region `number` of a forward, which has these arguments.

        Raises ConfigError if the budget cannot be met, which is known as the second forward begins.
        """
        inputs = bytes_of(tensors_in(args))
        if number == 0:
            self._take_measures()
            if self.choices and inputs > self.sizes[0].inputs:  # a longer batch
                self.choices = []
        if not self.choices:
            self._inputs[number] = inputs
        return self.choices[number] if number < len(self.choices) else Choice.RECOMPUTE

    @contextlib.contextmanager
    def measure(self, number: int, args: Any) -> Iterator[None]:
        """Count the bytes that a region's graph keeps beside its arguments, while it is recomputed."""
        if self.choices or number not in self._inputs:
            yield
            return
        body = _Storages(tensors_in(args))
        try:
            with _also(body.add):
                yield
        finally:  # torch ends a recomputation by an exception
            self._bodies[number] = body.nbytes
            body.let_go()

    def measured_bodies(self) -> dict[int, int]:
        """The bytes of the graphs that were measured since the last choice, by the number of the region."""
        return dict(self._bodies)

    def _take_measures(self) -> None:
        """Choose, if a forward and its backward have been measured."""
        inputs, bodies = self._inputs, self._bodies
        self._inputs, self._bodies = {}, {}
        if not bodies:  # no backward has followed
            return
        self.sizes = [RegionBytes(inputs[number], bodies.get(number, 0)) for number in sorted(inputs)]
        choices = choose(self.sizes, self.limit, can_offload=self._can_offload)
        if choices is None:
            raise ConfigError(
                f"rank {self._rank}: {_KEY} = {self.limit} bytes cannot be met: the {len(self.sizes)} checkpointed "
                f"regions of this model take {least(self.sizes, can_offload=self._can_offload)} bytes at this batch "
                f"size, all recomputed{' and with their inputs on the host' if self._can_offload else ''}.\n"
                "Set it to that or more, or use smaller batches or shorter sequences."
            )
        self.choices = choices
        if self._rank == 0:
            logger.info("%s", self._described())

    def _described(self) -> str:
        counts = {choice: self.choices.count(choice) for choice in Choice}
        peak = peak_of(self.sizes, self.choices)
        return (
            f"{_KEY}: of {len(self.choices)} checkpointed regions {counts[Choice.KEEP]} keep their graph, "
            f"{counts[Choice.RECOMPUTE] + counts[Choice.OFFLOAD]} are recomputed, {counts[Choice.OFFLOAD]} of these "
            f"with inputs on the host; {peak / _GB:.3g} GB of {self.limit / _GB:.3g} GB"
        )


def tensors_in(args: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of the floating tensors; memory that several share counts once."""
    storages = _Storages()
    for tensor in tensors:
        if tensor.is_floating_point():
            storages.add(tensor)
    return storages.nbytes


class _Storages:
    """Adds up the memory that tensors lie in, but that of parameters, and of the tensors in `without`."""

    def __init__(self, without: Sequence[torch.Tensor] = ()) -> None:
        self._seen = {tensor.untyped_storage()._cdata for tensor in without}
        self._kept: list[torch.Tensor] = []  # so that no address comes twice
        self.nbytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._kept.append(tensor)
            self.nbytes += storage.nbytes()

    def let_go(self) -> None:
        """Drop the tensors, to break a reference cycle through the autograd graph, which nobody collects."""
        self._kept.clear()


def _also(see: Callable[[torch.Tensor], None]) -> torch.autograd.graph.saved_tensors_hooks:
    """Show `see` what autograd saves; otherwise it is saved as without."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack, unpack = outer if outer is not None else (_same, _same)

    def seen(tensor: torch.Tensor) -> Any:
        see(tensor)
        return pack(tensor)

    return torch.autograd.graph.saved_tensors_hooks(seen, unpack)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
