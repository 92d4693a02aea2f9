"""Lets ranks run out of data at different times: torch's Join (torch.distributed.algorithms.join) over an engine.

A rank that has left its loop follows the others: it makes every call that all ranks must make, and computes nothing.
Its gradients are zeros. Inside the block each such call is told to the ranks that follow, by two small exchanges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from hf_zero.distributed.work import SharedCall
from hf_zero.errors import ConfigError, DivergenceError
from hf_zero.optim.hyperparameters import numbers_of
from hf_zero.runtime.backward_watch import in_backward
from hf_zero.runtime.unit_pass import Phase
from hf_zero.sharding.unit import UnitKind

_FOLLOWS = -1.0  # the number of no call: this rank has no data left


class Joining(JoinHook):
    """One Join block of one engine on one rank.

    Args:
        divide_by_initial_world_size: Gradients are means over all ranks; else over those that still have data.
    """

    def __init__(self, engine: Any, *, divide_by_initial_world_size: bool = True) -> None:
        self._engine = engine
        self._comm = engine.comm
        self._keeps_mean = divide_by_initial_world_size
        self._is_inside = False  # of a call that was told
        if self._comm.join_block is not None:  # it was left by an exception, or was not enabled
            self._comm.join_block.end()
        self._comm.join_block = self
        # Join asks for them next. A model that is not inside can be copied, and lets the group go with its owner.
        engine.module.__dict__.update(join_device=engine.device, join_process_group=dist.group.WORLD)
        # Before the hook that gathers the root unit
        self._hook = engine.module.register_forward_pre_hook(self._tell_forward, prepend=True)

    def end(self) -> None:
        """Let nobody be told any more."""
        self._hook.remove()
        self._comm.join_block = None
        self._engine.schedule.average_over(self._comm.world_size)

    # ---------------------------------------------------------------- a rank that has data
    def _tell_forward(self, module: Any, args: Any) -> None:
        if not in_backward():
            with self.tell(SharedCall.FORWARD if torch.is_grad_enabled() else SharedCall.EVALUATION, 0.0):
                pass

    @contextlib.contextmanager
    def tell(self, call: SharedCall, value: float) -> Iterator[None]:
        """Tell the ranks that follow of a call, unless it is a part of another one."""
        config = self._engine._join_config
        is_outermost, self._is_inside = not self._is_inside, True
        try:
            if is_outermost and config.enable:
                if not config.is_first_joinable:
                    raise ConfigError(
                        "Join: expected the engine as the first of the joinables, which tells the others"
                    )
                Join.notify_join_context(self._engine)
                self._exchange(float(call), value)
            yield
        finally:
            self._is_inside = not is_outermost

    def _exchange(self, call: float, value: float) -> tuple[float, float]:
        """Return the call of the ranks that have data, and its value."""
        rows = self._comm.all_gather_numbers([call, value], "ranks that have data")
        active = [row for row in rows if row[0] != _FOLLOWS]
        if any(row != active[0] for row in active):
            raise DivergenceError(
                "inside Join, ranks that have data made different calls: "
                + "; ".join(f"rank {rank}: {_shown(*row)}" for rank, row in enumerate(rows))
            )
        if not self._keeps_mean and active[0][0] == SharedCall.BACKWARD:
            self._engine.schedule.average_over(len(active))
        if active[0][0] in (SharedCall.STEP, SharedCall.UPDATE, SharedCall.CLIP):
            self._share_numbers(is_source=call != _FOLLOWS)
        return active[0][0], active[0][1]

    def _share_numbers(self, *, is_source: bool) -> None:
        """A scheduler that the loop steps has stepped on ranks that have data only."""
        if (optimizer := self._engine.optimizer) is None:
            return
        mine = numbers_of(optimizer.param_groups) if is_source else None
        given = next(one for one in self._comm.all_gather_object(mine, "hyperparameters") if one is not None)
        if not is_source:
            for group, numbers in zip(optimizer.param_groups, given, strict=True):
                group.update(numbers)

    # ---------------------------------------------------------------- a rank that follows
    def main_hook(self) -> None:
        """Follow one call."""
        call, value = self._exchange(_FOLLOWS, 0.0)
        self._is_inside = True
        try:
            self._follow(SharedCall(int(call)), value)
        finally:
            self._is_inside = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have left their loops."""
        self.end()
        for name in ("join_device", "join_process_group", "_join_config"):
            self._engine.module.__dict__.pop(name, None)

    def _follow(self, call: SharedCall, value: float) -> None:
        schedule, optimizer = self._engine.schedule, self._engine.optimizer
        if call in (SharedCall.FORWARD, SharedCall.EVALUATION):
            with torch.set_grad_enabled(call is SharedCall.FORWARD):
                self._follow_forward()
        elif call is SharedCall.BACKWARD:
            with schedule.with_boundary(bool(value)):
                schedule.begin_backward()
                schedule.end_backward(has_data=False)
        elif call is SharedCall.STEP:
            schedule.step({})
        else:
            assert optimizer is not None
            act: Callable[[], Any] = {
                SharedCall.UPDATE: optimizer.step,
                SharedCall.CLIP: lambda: optimizer.clip_grad_norm(value),
                SharedCall.DROP: optimizer.zero_grad,
            }[call]
            act()

    def _follow_forward(self) -> None:
        params = self._engine.params
        self._engine.schedule.begin_forward()
        for root in (unit for unit in params.units if unit.kind is UnitKind.ROOT):
            params.before_use(root, Phase.FORWARD)
            params.begin_forward(self._engine.module)
            params.end_forward()
            params.reshard_idle()
            if torch.is_grad_enabled():
                params.hold(root)
            params.after_use(root)


def _shown(call: float, value: float) -> str:
    return "no data left" if call == _FOLLOWS else f"{SharedCall(int(call)).name.lower()} ({value:g})"
