"""A tensor for `parameter.grad` where a gradient is in shards. See [Note: parameter.grad] in param_grads.py."""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.errors import StateError

INSTEAD = (
    "To clip, call engine.clip_grad_norm_(max_norm), under Accelerate and Trainer accelerator.clip_grad_norm_, or set "
    "gradient_clipping. To read or change a gradient, call hf_zero.full_grad, hf_zero.set_full_grad or "
    "hf_zero.update_full_grads on all ranks. At stage 0 parameter.grad is the gradient itself, once the last backward "
    "before a step is over."
)

_ACCUMULATES = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)  # in autograd; the second with create_graph


class GradStandIn(torch.Tensor):
    """A tensor that stands for a gradient that is not complete on this rank."""

    parameter: str  # its name
    added: torch.Tensor | None  # what autograd has added meanwhile

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, placeholder: torch.Tensor, name: str) -> GradStandIn:
        # It lies over the parameter's placeholder: a storage of its own would look as large as the gradient.
        self: GradStandIn = torch.Tensor._make_subclass(cls, placeholder)
        self.parameter, self.added = name, None
        return self

    def take_added(self) -> torch.Tensor | None:
        """Return what autograd has added, for the reducer; None if it has added nothing."""
        added, self.added = self.added, None
        return added

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func in _ACCUMULATES and isinstance(args[0], GradStandIn) and torch._C._current_graph_task_id() != -1:
            mine = args[0]
            mine.added = args[1] if mine.added is None else mine.added + args[1]
            return mine
        found = next(one for one in _flat(args) if isinstance(one, GradStandIn))
        raise StateError(f"parameter.grad of {found.parameter} has no values: its gradient is in shards.\n{INSTEAD}")

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        return f"<gradient of {self.parameter}, in shards; read it with hf_zero.full_grad>"


def _flat(values: Any) -> list[Any]:
    return [one for value in values for one in (_flat(value) if isinstance(value, list | tuple) else [value])]
