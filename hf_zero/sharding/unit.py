"""A unit and its state machine."""

from __future__ import annotations

import enum

from torch import nn

from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.partition import UnitKind


class UnitState(enum.Enum):
    """What memory exists in each state."""

    SHARDED = "sharded"  # the shard only; parameters are placeholders
    GATHERING = "gathering"  # full buffers are being filled; parameters are still placeholders
    FULL = "full"  # full buffers; parameters are views of them
    KEPT = "kept"  # as FULL, but nobody uses it now: it waits for a use that is near, and may be resharded before


class ShardUnit:
    """Parameters that are gathered and reduced together, around one module.

    SHARDED -> gather_start() -> GATHERING -> gather_finish() -> FULL -> release() -> SHARDED
    FULL -> keep() -> KEPT -> use_again() -> FULL, or KEPT -> release() -> SHARDED

    Invariants:
      - No unsharded memory exists in SHARDED. A unit that is not `on_demand` is FULL for ever.
      - All ranks call gather_start in the same order: collectives match by order.
    """

    def __init__(self, name: str, kind: UnitKind, module: nn.Module, buffers: list[FlatParam]) -> None:
        self.name = name
        self.kind = kind
        self.module = module
        self.buffers = buffers
        self.on_demand = any(buffer.on_demand for buffer in buffers)
        self.state = UnitState.FULL
        self._measure()

    def _measure(self) -> None:
        self.numel = sum(buffer.layout.padded_numel for buffer in self.buffers)
        self.full_bytes = sum(buffer.full_bytes for buffer in self.buffers)

    def replace(self, old: FlatParam, new: list[FlatParam]) -> None:
        """Put buffers with the same parameters in the place of `old`, in the state of the unit."""
        place = self.buffers.index(old)
        self.buffers[place : place + 1] = new
        self._measure()

    @property
    def is_offloaded(self) -> bool:
        """Whether a gather waits for more than the other ranks: a copy from the host, a read, an update there.

        The same on all ranks.
        """
        return any(buffer.is_offloaded for buffer in self.buffers)

    def prefetch(self) -> None:
        """Start bringing the shards near where they are on a slow medium. No communication."""
        for buffer in self.buffers:
            buffer.prefetch()

    def gather_start(self) -> None:
        """Start to unshard the parameters. All ranks must call, in the same order."""
        self._expect(UnitState.SHARDED)
        for buffer in self.buffers:
            buffer.gather_start()
        self.state = UnitState.GATHERING

    def gather_finish(self) -> None:
        self._expect(UnitState.GATHERING)
        for buffer in self.buffers:
            buffer.gather_finish()
        self.state = UnitState.FULL

    def keep(self) -> None:
        """Nobody uses the unit any more; it stays unsharded for a use to come."""
        self._expect(UnitState.FULL)
        self.state = UnitState.KEPT

    def use_again(self) -> None:
        self._expect(UnitState.KEPT)
        self.state = UnitState.FULL

    def release(self) -> None:
        if self.state is not UnitState.KEPT:
            self._expect(UnitState.FULL)
        for buffer in self.buffers:
            buffer.release()
        self.state = UnitState.SHARDED

    def forget(self) -> None:
        """A pass was broken off, and its connections are closed: back to SHARDED, whatever the state."""
        for buffer in self.buffers:
            buffer.forget_gather()
            buffer.release()
        self.state = UnitState.SHARDED

    def _expect(self, state: UnitState) -> None:
        if self.state is not state:
            raise AssertionError(f"unit {self.name} is {self.state.value}, expected {state.value}")
