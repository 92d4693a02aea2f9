"""The order of a training step, from the first forward to the update, and the counts of both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.work import SharedCall
from hf_zero.errors import StateError
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.runtime.backward_watch import in_backward
from hf_zero.runtime.build import BuiltUnits
from hf_zero.runtime.captured_graphs import CaptureWatch
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.hooks import ModelAttachment
from hf_zero.runtime.param_grads import ParamGrads
from hf_zero.runtime.prefetch import PrefetchLimits
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.runtime.step_events import StepEvents
from hf_zero.runtime.unfreeze import Unfreeze
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.runtime.weight_edits import WeightEdits
from hf_zero.sharding.unit import ShardUnit


class StepSchedule(StepEvents):
    """Parameters, gradients, optimizer and learning rates of one engine, and the order in which they act.

    The engine, the hooks on the model, the parameters, the reducer and the optimizer call its methods, in the order
    in which they stand here. A method that starts a collective is called on all ranks.

    Args:
        accumulation_steps: The number of micro-batches of an update.
        trains: There are gradients and masters.
    """

    def __init__(self, built: BuiltUnits, config: ResolvedConfig, accumulation_steps: int, *, trains: bool) -> None:
        self.global_steps = 0
        self.skipped_steps = 0  # updates that were left out on all ranks: a gradient was not finite
        self.step_applied = False  # the last `step` updated the parameters
        self.forced_boundary: bool | None = None  # the script's own answer, instead of the count
        self.optimizer: ShardedOptimizer | None = None
        self.lr_scheduler: Any = None
        self.attachment: ModelAttachment | None = None  # None while the engine is off its model
        self._no_sync = False  # inside the block of that name
        self._reduces_late = False  # what can wait is reduced by `step`, see `update_at_every_step`
        self._trains = trains
        self._comm: Comm = built.comm
        self._captures = CaptureWatch(built.comm.device)
        self._loss_scale = built.loss_scale
        overlap, on_arrival = config.zero.overlap_comm, not any(unit.on_demand for unit in built.units)
        self.reducer = GradReducer(built.grads, self._comm, self, overlap=overlap, on_arrival=on_arrival)
        self.param_grads = ParamGrads(self.reducer, self)
        self._weight_edits = WeightEdits(built.units, self.param_grads, self)
        self.params = OnDemandParams(built.units, PrefetchLimits.of(config.zero), self, self._comm.largest)
        self._unfreeze = Unfreeze(built, self.params, self)
        self.accumulate_over(accumulation_steps)

    # ---------------------------------------------------------------- micro-batches
    def is_boundary(self) -> bool:
        """See StepEvents."""
        return not self._reduces_late and self._step_updates()

    def _step_updates(self) -> bool:
        """Whether the next `step` updates: by the count, or by `forced_boundary`; never inside `no_sync`."""
        if self._no_sync:
            return False
        if self.forced_boundary is not None:
            return self.forced_boundary
        return self._ends_window

    @property
    def _ends_window(self) -> bool:
        """Whether the micro-batch is the last of its window by the count."""
        return (self.micro_steps + 1) % self.accumulation_steps == 0

    @contextlib.contextmanager
    def with_boundary(self, boundary: bool) -> Iterator[None]:
        """Inside, `boundary` says whether a backward is the last before an update."""
        before, self.forced_boundary = self.forced_boundary, boundary
        try:
            yield
        finally:
            self.forced_boundary = before

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, no backward is the last before the update, and no step updates."""
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    def update_at_every_step(self) -> None:
        """Let the caller accumulate: every `step` updates, and gradients that can wait are reduced there."""
        self.forced_boundary = self._reduces_late = True

    def restart_at(self, global_steps: int, skipped_steps: int) -> None:
        """Set the counts of updates made and skipped; the next micro-batch is the first of its window."""
        self.global_steps, self.skipped_steps = global_steps, skipped_steps
        self.micro_steps = global_steps * self.accumulation_steps

    def accumulate_over(self, steps: int) -> None:
        """Set the number of micro-batches of an update, between two updates."""
        self.accumulation_steps = steps
        self.restart_at(self.global_steps, self.skipped_steps)
        self.average_over(self._comm.world_size)

    def average_over(self, ranks: int) -> None:
        """Divide the sums over ranks and micro-batches by so many ranks, from the next reduces on."""
        scale = 1 / (ranks * self.accumulation_steps)
        for acc in self.reducer.accumulators:
            acc.use_scale(scale)
        self._unfreeze.use_scale(scale)

    # ---------------------------------------------------------------- forward
    def begin_forward(self) -> None:
        self._captures.check(self._comm.rank)
        if torch.is_grad_enabled() and not in_backward():
            self.param_grads.hide()
            self._loss_scale.end_backward()  # of a loss that was scaled without meeting this model
        self._unfreeze.begin_forward()

    def unfrozen(self, added: Sequence[GradAccumulator]) -> None:
        """See StepEvents."""
        self.reducer.regroup()
        if self.attachment is not None:
            self.attachment.on_gradients(added)
        if self.optimizer is not None:
            self.optimizer.take_in(added)

    def unit_used(self, unit: ShardUnit, *, late: bool) -> None:
        """See StepEvents."""
        self._weight_edits.unit_used(unit, late=late)

    # ---------------------------------------------------------------- backward
    def begin_backward(self) -> None:
        if not self._trains:
            raise StateError(
                f"rank {self._comm.run_rank}: backward through a model that hf_zero holds for inference only: it has "
                "neither gradients nor master weights.\nTo train it, hand it to a Trainer, to accelerator.prepare or, "
                "with an optimizer, to hf_zero.initialize."
            )
        if self.optimizer is not None:
            self.optimizer.check_here("a backward")
        with self._comm.shared_call(SharedCall.BACKWARD, float(self.is_boundary())):
            pass
        self.param_grads.hide()
        self.params.begin_backward()

    def gradients_complete(self) -> None:
        """See PassEvents."""
        self.reducer.start_complete()

    def unit_left(self, unit: ShardUnit) -> None:
        """See StepEvents."""
        self.reducer.unit_left(unit)

    def gradient_is_final(self, acc: GradAccumulator) -> None:
        """Let an offloaded optimizer begin with a gradient. See StepEvents."""
        if self.optimizer is not None:
            self.optimizer.gradient_is_final(acc)

    def end_backward(self, *, has_data: bool = True) -> None:
        """`has_data`: False on a rank that takes part in a backward of the others, with zeros."""
        self.params.end_gathers()
        with torch.no_grad():
            self.reducer.end_backward(boundary=self.is_boundary(), expects_gradients=has_data)
            self.param_grads.show()
        self._comm.note_call("backward")
        self.params.end_backward()
        self._loss_scale.end_backward()

    # ---------------------------------------------------------------- update
    def step(self, lr_kwargs: Mapping[str, Any]) -> bool:
        """End a micro-batch; returns whether it was the last one before an update, which has then been made.

        After an update that was not left out the learning rates follow, by `lr_scheduler.step(**lr_kwargs)`.
        """
        with self._comm.shared_call(SharedCall.STEP):
            return self._step(lr_kwargs)

    def _step(self, lr_kwargs: Mapping[str, Any]) -> bool:
        counted = self.forced_boundary is None or self._reduces_late
        if self._no_sync and counted and self._ends_window:
            raise StateError(
                f"rank {self._comm.run_rank}: engine.step() inside engine.no_sync(), at the micro-batch that ends a "
                f"window of {self.accumulation_steps} (gradient_accumulation_steps): the update would be left out.\n"
                "Leave no_sync before the last micro-batch of a window."
            )
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

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce all that backwards have left in this window, and show it, before the step does."""
        if self.optimizer is None:
            raise StateError("this engine has no optimizer: pass one to hf_zero.initialize, or an optimizer block")
        self.optimizer.reduce_gradients()
        self.param_grads.show()

    def zero_grad(self) -> None:
        """Forget the gradients of this accumulation window."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        else:
            self.param_grads.discard()

    def finish_updates(self) -> None:
        """Wait for offloaded updates that run beside the training, delayed ones too."""
        if self.optimizer is not None:
            self.optimizer.finish_updates()

    def gradients_change(self) -> None:
        """Roll back updates that began with gradients which the user edits now."""
        if self.optimizer is not None:
            self.optimizer.rollback_early()

    def collect_weight_edits(self) -> bool:
        """See StepEvents."""
        return self._weight_edits.collect_resident()

    def end_step(self) -> None:
        """Count a step whose shards the optimizer has updated, or which it skipped (fp16)."""
        self.params.end_step()
        self.global_steps += 1
        self.step_applied = self.optimizer is not None and not self.optimizer.overflow
        self.skipped_steps += not self.step_applied

    def check_current(self) -> None:
        """See PassEvents."""
        if self.optimizer is not None and self.optimizer.has_delayed_update:
            raise StateError(
                f"rank {self._comm.run_rank}: the update of the last step is delayed, so the parameters do not have "
                "it yet.\nCall engine.finish_updates() on every rank first (checkpoints, engine.full_state_dict do "
                "so)."
            )
