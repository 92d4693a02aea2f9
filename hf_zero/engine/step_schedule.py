"""What happens as a step of training goes on, from the first forward to the update, and the counts of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.runtime.build import BuiltUnits
from hf_zero.runtime.captured_graphs import CaptureWatch
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.hooks import in_backward
from hf_zero.runtime.prefetch import PrefetchLimits
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.runtime.unfreeze import Unfreeze
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.runtime.weight_edits import WeightEdits


class StepSchedule:
    """Parameters, gradients, optimizer and learning rates of one engine, and the order in which they act.

    Its methods are called by the engine, by the hooks on the model, by the reducer and by the optimizer, in the order
    in which they stand here. A method that starts a collective is called on all ranks.

    Args:
        accumulation_steps: Micro-batches of an update.
        trains: There are gradients and masters.
        on_new_gradients: Called with the accumulators of parameters that were unfrozen, before they are used.
    """

    def __init__(
        self,
        built: BuiltUnits,
        config: ResolvedConfig,
        accumulation_steps: int,
        *,
        trains: bool,
        on_new_gradients: Callable[[list[GradAccumulator]], None],
    ) -> None:
        self.global_steps = 0
        self.skipped_steps = 0  # updates that were left out on all ranks: a gradient was not finite
        self.step_applied = False  # the last `step` updated the parameters
        self.forced_boundary: bool | None = None  # the script's own answer, in the place of the count
        self.optimizer: ShardedOptimizer | None = None
        self.lr_scheduler: Any = None
        self._no_sync = False
        self._trains = trains
        self._comm: Comm = built.comm
        self._captures = CaptureWatch(built.comm.device)
        self._loss_scale = built.loss_scale
        self._is_sharded = any(unit.on_demand for unit in built.units)
        self._on_new_gradients = on_new_gradients
        self.reducer = GradReducer(
            built.grads,
            self._comm,
            overlap=config.zero.overlap_comm,
            on_arrival=not self._is_sharded,
            is_boundary=self.is_boundary,
            on_final=self.gradient_is_final,
            on_change=self.gradients_change,
        )
        edits = WeightEdits(built.units, self.reducer.shown, refuse_delayed=self.check_current)
        limits = PrefetchLimits.of(config.zero)
        self.params = OnDemandParams(built.units, limits, on_left=self.reducer.unit_left, on_used=edits.used)
        self._unfreeze = Unfreeze(built, self.params, self._take_in)
        self.accumulate_over(accumulation_steps)

    # ---------------------------------------------------------------- micro-batches
    def is_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one before the update."""
        return not self._no_sync and self._step_updates()

    def _step_updates(self) -> bool:
        """Whether the next `step` updates: by the count, or by `forced_boundary`."""
        if self.forced_boundary is not None:
            return self.forced_boundary
        return (self.micro_steps + 1) % self.accumulation_steps == 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last before the update."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def restart_at(self, global_steps: int, skipped_steps: int) -> None:
        """So many updates have been made or left out, and the next micro-batch is the first of its window."""
        self.global_steps, self.skipped_steps = global_steps, skipped_steps
        self.micro_steps = global_steps * self.accumulation_steps

    def accumulate_over(self, steps: int) -> None:
        """Set the number of micro-batches of an update, between two updates."""
        self.accumulation_steps = steps
        self.restart_at(self.global_steps, self.skipped_steps)
        scale = 1 / (self._comm.world_size * steps)
        for acc in self.reducer.accumulators:
            acc.use_scale(scale)
        self._unfreeze.use_scale(scale)

    # ---------------------------------------------------------------- forward
    def begin_forward(self) -> None:
        self._captures.check(self._comm.rank)
        if torch.is_grad_enabled() and not in_backward():
            self.reducer.shown.hide()
        self._unfreeze.look()

    def end_forward(self) -> None:
        """Before the loss counts. See [Note: Matching] in operation_log.py."""
        if self._is_sharded and not self.params.all_pinned:
            self._comm.confirm("a forward")

    # ---------------------------------------------------------------- backward
    def begin_backward(self) -> None:
        if not self._trains:
            raise StateError(
                f"rank {self._comm.run_rank}: backward through a model that hf_zero holds for inference only: it has "
                "neither gradients nor master weights.\nTo train it, hand it to a Trainer, to accelerator.prepare or, "
                "with an optimizer, to hf_zero.initialize."
            )
        self.reducer.shown.hide()
        self.params.begin_backward()

    def gradient_is_final(self, acc: GradAccumulator) -> None:
        """Reduced, and no other one follows before the update: an offloaded optimizer may begin with it."""
        if self.optimizer is not None:
            self.optimizer.gradient_is_final(acc)

    def end_backward(self) -> None:
        with torch.no_grad():
            self.reducer.end_backward(boundary=self.is_boundary())
            self.reducer.shown.show()
        self._comm.note_call("backward")
        self.params.end_backward()
        self._loss_scale.end_backward()

    # ---------------------------------------------------------------- update
    def step(self, lr_kwargs: Mapping[str, Any]) -> bool:
        """End a micro-batch; returns whether it was the last one before an update, which has then been made.

        After an update that was not left out the learning rates follow, by `lr_scheduler.step(**lr_kwargs)`.
        """
        boundary = self._step_updates()
        self.step_applied = False  # until `end_step`
        self.micro_steps += 1
        if boundary:
            if self.optimizer is None:
                raise StateError("this engine has no optimizer: pass one to hf_zero.initialize, or an optimizer block")
            self.optimizer.step()
            if self.lr_scheduler is not None and not self.optimizer.overflow:
                self.lr_scheduler.step(**lr_kwargs)
        else:
            self._comm.note_call("step inside an accumulation window")
        return boundary

    def zero_grad(self) -> None:
        """Forget the gradients of this accumulation window."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        else:
            self.reducer.shown.discard()

    def finish_updates(self) -> None:
        """Wait for offloaded updates that run beside the training, delayed ones too."""
        if self.optimizer is not None:
            self.optimizer.finish_updates()

    def gradients_change(self) -> None:
        """By hand, after an offloaded optimizer may have begun with them."""
        if self.optimizer is not None:
            self.optimizer.rollback_early()

    def end_step(self) -> None:
        """The optimizer has updated the shards, or left the step out (fp16)."""
        self.params.end_step()
        self.global_steps += 1
        self.step_applied = self.optimizer is not None and not self.optimizer.overflow
        self.skipped_steps += not self.step_applied

    def check_current(self) -> None:
        """Raise StateError where parameters are to be read that do not have the last update yet."""
        if self.optimizer is not None and self.optimizer.has_delayed_update:
            raise StateError(
                f"rank {self._comm.run_rank}: the update of the last step is delayed, so the parameters do not have "
                "it yet.\nCall engine.finish_updates() on every rank first (checkpoints, engine.full_state_dict do "
                "so)."
            )

    def _take_in(self, added: list[GradAccumulator]) -> None:
        self.reducer.regroup()
        self._on_new_gradients(added)
        if self.optimizer is not None:
            self.optimizer.take_in(added)
