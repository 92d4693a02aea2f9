"""A tensor that has a shape, a type and a device, and no values: what `state_dict()` shows of a shard."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from hf_zero.errors import StateError

logger = logging.getLogger(__name__)


class ShapeOnly(torch.Tensor):
    """Stands for a sharded parameter. Loaders read its name, shape and type; reading or saving values raises."""

    parameter_name: str
    saves_empty = False  # for programs that save such a state dict and then another file over it, as under DeepSpeed

    @staticmethod
    def __new__(cls, param: torch.Tensor, name: str) -> ShapeOnly:
        made: ShapeOnly = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        made.parameter_name = name
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        flat = [one for given in args for one in (given if isinstance(given, list | tuple) else [given])]
        first = next((one for one in [*flat, *(kwargs or {}).values()] if isinstance(one, ShapeOnly)), None)
        if func is torch.ops.aten.detach.default and first is not None:
            return ShapeOnly(first, first.parameter_name)
        _refuse("a sharded parameter" if first is None else first.parameter_name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.saves_empty:
            _refuse(self.parameter_name)
        _warn_of_empty()
        return torch.empty(0, dtype=self.dtype, device="cpu").__reduce_ex__(protocol)

    def data_ptr(self) -> NoReturn:
        _refuse(self.parameter_name)

    def storage(self) -> NoReturn:
        _refuse(self.parameter_name)

    def untyped_storage(self) -> NoReturn:
        _refuse(self.parameter_name)

    def numpy(self, *, force: bool = False) -> NoReturn:
        _refuse(self.parameter_name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShapeOnly({self.parameter_name}, shape={tuple(self.shape)}, dtype={self.dtype}, sharded)"

    # Without this every operation first makes a subclass of its result, `detach` a plain tensor.
    __torch_function__: Callable[..., Any] = torch._C._disabled_torch_function_impl


@functools.cache
def _warn_of_empty() -> None:
    """Warn once."""
    logger.warning(
        "a state_dict() of sharded parameters is saved, and has no values of theirs, as under DeepSpeed: gather them "
        "(zero.GatheredParameters), and save them then"
    )


def _refuse(name: str) -> NoReturn:
    raise StateError(
        f"{name} is sharded: state_dict(), .data and .detach() have its shape and type, not its values.\nOn all "
        "ranks call trainer.save_model(), model.save_pretrained(), accelerator.get_state_dict(model) or "
        "engine.full_state_dict(keep=rank == 0); or read inside `with hf_zero.gathered_params(model):`. An "
        "average of weights is hf_zero.ShardedEMA."
    )
