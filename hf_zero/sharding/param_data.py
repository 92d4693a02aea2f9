"""Brings a parameter that the user made into memory of hf_zero's, and gives what lies there a storage of its own."""

from __future__ import annotations

import torch
from torch import nn

from hf_zero.errors import StateError


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor with the same memory and a storage of its own; None on a device that dlpack does not know.

    Parameters lie one behind the other in one storage, and safetensors and accelerate take tensors of one storage for
    tied: they would save the first of them only, or refuse.
    """
    try:
        return torch.utils.dlpack.from_dlpack(tensor)
    except ValueError:
        return None


def set_data(param: nn.Parameter, values: torch.Tensor) -> None:
    """Let `param` have `values` as its data, whatever the device of either; it stays the same object.

    Raises:
        StateError: torch refuses, because of what the script keeps of the parameter.
    """
    if torch._has_compatible_shallow_copy_type(param, values):
        param.data = values
        return
    # torch exchanges no data between the CPU and a device that it does not know (Ascend's, for one), nor with the meta
    # device. There it exchanges all that is behind the two objects, so gradient and hooks have to be brought back.
    grad = param.grad
    # Empty: a parameter that is made of `values` would take every later write to their memory for one to itself.
    fresh = nn.Parameter(values.new_empty(0), param.requires_grad)
    fresh.__class__ = type(param)
    try:
        torch.utils.swap_tensors(param, fresh)
    except RuntimeError as error:
        raise StateError(
            f"a parameter of shape {list(values.shape)} cannot move from {param.device} to {values.device}: {error}\n"
            "Hand the model over before its first forward and before anything keeps weak references to parameters, "
            f'or move it there first: model.to("{values.device}").'
        ) from error
    param.__dict__.update(fresh.__dict__)  # attributes belong to the object
    param.data = values
    if grad is not None:
        param.grad = grad.to(values)
    # Registered at what was behind the object until now
    param._backward_hooks = param._backward_hooks
    param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
