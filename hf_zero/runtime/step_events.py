"""The events of a training step: what parameters and gradients tell the one who orders the step."""

from __future__ import annotations

from collections.abc import Sequence

from hf_zero.runtime.backward_watch import PassEvents
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.sharding.unit import ShardUnit


class StepEvents(PassEvents):
    """The events of one engine's step. `StepSchedule` in engine/step_schedule.py acts on them; here nothing does.

    [Note: The path of a gradient]
    autograd's hook in hooks.py -> ArrivingGrads.receive and take_waiting -> GradAccumulator.take, which adds it. Then
    `unit_left`, `gradients_complete` or `end_backward` of the schedule -> GradReducer -> GradAccumulator.reduce_start
    -> Reduction -> Comm.reduce_scatter, and GradAccumulator.reduce_finish, after which the shard holds it.
    """

    def is_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one before the update."""
        return True

    # ---------------------------------------------------------------- parameters (unshard.py, unfreeze.py)
    def unit_used(self, unit: ShardUnit, *, late: bool) -> None:
        """An on-demand unit is still unsharded after a use, or at an end of backward; `late`: backward has begun."""

    def unit_left(self, unit: ShardUnit) -> None:
        """Backward has left a unit for good. Comes at the same point on all ranks."""

    def unfrozen(self, added: Sequence[GradAccumulator]) -> None:
        """The `added` accumulators belong to parameters that require gradients by now and are used next."""

    # ---------------------------------------------------------------- gradients (reduce_schedule.py, param_grads.py)
    def gradient_is_final(self, acc: GradAccumulator) -> None:
        """A reduce of the last backward before the update is over: the shard holds the gradient of the window, unless
        more arrives late."""

    def gradients_change(self) -> None:
        """The user is about to change gradients or weights that an update may have used already."""

    def collect_weight_edits(self) -> bool:
        """Take over what the user wrote to weights that are never resharded; return whether that was anything."""
        return False
