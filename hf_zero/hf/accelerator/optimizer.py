"""The optimizer that `accelerator.prepare` hands out: accelerate's gating around the engine's sharded step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError, StateError


class ZeroAcceleratedOptimizer(AcceleratedOptimizer):
    """Steps the engine where gradients are in sync, as accelerate sees it.

    Clipping happens once per step: by the caller's `accelerator.clip_grad_norm_`, else here by the JSON's
    `gradient_clipping`.

    Args:
        optimizer: What `engine.attach_optimizer` returned.
        clipping: The JSON's `gradient_clipping`; 0.0 leaves clipping to the caller alone (Trainer).
        clipping_is_fixed: The JSON names a number, so a caller who clips to another one contradicts it.
    """

    def __init__(self, optimizer: Any, engine: ZeroEngine, *, clipping: float, clipping_is_fixed: bool) -> None:
        # With device_placement accelerate would send the state through state_dict, which shards do not allow.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine
        self._clipping = clipping
        self._clipping_is_fixed = clipping_is_fixed
        self._clipped_by_caller = False
        self.schedule: Any = None  # of the configuration, where the script has no scheduler: stepped here

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """The global gradient norm before clipping; clips to `max_norm`. All ranks must call.

        Raises:
            ConfigError: The JSON fixes another value.
        """
        if max_norm == float("inf"):
            return self.engine.clip_grad_norm_(max_norm)
        if self._clipping_is_fixed and self._clipping > 0.0 and max_norm != self._clipping:
            raise ConfigError(
                f"clip_grad_norm_ was called with {max_norm:g}, but the configuration has gradient_clipping = "
                f'{self._clipping:g}.\nPass {self._clipping:g}, or set "gradient_clipping" to "auto" or {max_norm:g}.'
            )
        self._clipped_by_caller = True
        return self.engine.clip_grad_norm_(max_norm)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update this rank's shards and the parameters, if gradients are in sync. All ranks must call."""
        if not self.gradient_state.sync_gradients:
            return
        if closure is not None:
            closure = functools.partial(self._clipped, closure)
        elif self._clipping > 0.0 and not self._clipped_by_caller:
            self.engine.clip_grad_norm_(self._clipping)
        self._clipped_by_caller = False
        self.engine.reports.step_starts()
        super().step(closure)
        self.engine.reports.step_ends(boundary=True)
        if self.schedule is not None and not self.step_was_skipped:
            self.schedule.step()

    def _clipped(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        if self._clipping > 0.0 and not self._clipped_by_caller:
            with torch.no_grad():
                self.engine.clip_grad_norm_(self._clipping)
        self._clipped_by_caller = False
        return loss

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out on all ranks, because its gradient was not finite."""
        return self.engine.optimizer is not None and self.engine.optimizer.overflow

    def state_dict(self) -> dict[str, Any]:
        raise StateError(
            "optimizer.state_dict() would give this rank's shards only.\n"
            "Save with trainer checkpoints, accelerator.save_state(folder) or engine.save_checkpoint(folder), "
            "and read one parameter's state with hf_zero.full_optimizer_state(parameter)."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise StateError(
            "optimizer.load_state_dict() does not fit sharded state.\n"
            "Load with resume_from_checkpoint, accelerator.load_state(folder) or engine.load_checkpoint(folder)."
        )
