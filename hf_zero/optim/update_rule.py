"""An update of masters by hf_zero's own code: the user's optimizer holds placeholders, and the hyperparameters."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from hf_zero.optim.offload.update_worker import UpdateWorker
from hf_zero.optim.param_groups import OwnedSlice
from hf_zero.runtime.grad_accumulator import GradAccumulator

MOMENTS = ("exp_avg", "exp_avg_sq")


class UpdateRule(abc.ABC):
    """Adam and AdamW over the flat parameters that `take_in` adds. A method that is left out here does nothing."""

    worker: UpdateWorker | None = None  # the thread that updates beside the training

    @property
    def has_delayed(self) -> bool:
        """Whether an update waits for the next step to be published; the same on all ranks."""
        return False

    @abc.abstractmethod
    def take_in(self, owned: Sequence[tuple[OwnedSlice, Mapping[str, Any]]], order: Sequence[GradAccumulator]) -> None:
        """Update more flat parameters.

        Args:
            owned: What this rank updates, with its param group: the groups are read at every step.
            order: The accumulators in the order in which the next forward needs their parameters.
        """

    @abc.abstractmethod
    def step(self, has_grad: Mapping[GradAccumulator, Sequence[bool]], factor: float) -> bool:
        """Start the updates of this step; return whether parameters change now: the same on all ranks.

        Args:
            has_grad: By gradient accumulator: whether each of its parameters had a gradient on any rank.
            factor: Multiplies all gradients.
        """

    @abc.abstractmethod
    def state_of(self, owned: OwnedSlice) -> dict[str, Any]:
        """Return the state of a slice by kind: the shard of each moment, and "step"; {} before its first update."""

    @abc.abstractmethod
    def load_run(self, owned: OwnedSlice, values: Mapping[str, Any]) -> None:
        """Set moments (1-D or the slice's shape) and step of a slice from torch's names; what is missing is zero."""

    @abc.abstractmethod
    def moment_bytes(self) -> int:
        """Return the bytes of all moments, on every medium."""

    def restart_at(self, step: int) -> None:  # noqa: B027
        """Take note that `step` updates have been made before, in another run. All ranks must call."""

    def gradient_is_final(self, acc: GradAccumulator) -> None:  # noqa: B027
        """Take note that the gradient of `acc` is complete, in the last backward before the step."""

    def rollback(self) -> None:  # noqa: B027
        """Undo what was started before the step: the accumulation window is given up."""

    def finish(self) -> bool:
        """Finish and publish what steps have started; return whether a delayed update was published."""
        return False

    def close(self) -> None:  # noqa: B027
        """Give up what the updates need: nothing is updated any more."""
