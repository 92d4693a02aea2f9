"""A parameter is, while it is sharded, of a class that knows its shape and type, and has no values to give.

[Note: Values of a sharded parameter]
A placeholder's NaN must reach no result, and a write to it would be lost. So a sharded parameter changes its class,
as long as an engine's hooks are on its model; torch then asks that class before any function runs on it. What needs
shape, type or gradient only is answered. Where values are read or written, the flat parameter is asked (`on_values`):
it unshards the parameter, and the function runs as ever, or it raises. `param.data` and `param.detach()` have shape
and type. What autograd saves is read below Python, without such a question; there the placeholder shows NaN.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from hf_zero.errors import StateError
from hf_zero.sharding.shape_only import ShapeOnly

_P = ParamSpec("_P")
_R = TypeVar("_R")
# (parameter, whether to write) -> whether it is unsharded now; or it raises an error of its own
OnValues = Callable[[nn.Parameter, bool], bool]


class Holder(Protocol):
    """A flat parameter."""

    params: list[nn.Parameter]
    on_values: OnValues | None

    def name_of(self, param: nn.Parameter) -> str: ...


holders: weakref.WeakSet[Any] = weakref.WeakSet()  # those with `on_values`

_LIKE = "empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
_NEW = "new_empty new_empty_strided new_zeros new_ones new_full new_tensor"
_SHAPE = "size dim ndimension numel nelement stride storage_offset is_contiguous element_size is_same_size __len__"
_TYPE = "is_floating_point is_complex is_signed get_device is_pinned is_shared result_type __hash__ untyped_storage"
_AUTOGRAD = "register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad grad backward"
# `isnan` says truly that there are no values.
_WITHOUT_VALUES = frozenset(
    f"{_LIKE} {_NEW} {_SHAPE} {_TYPE} {_AUTOGRAD} isnan _has_compatible_shallow_copy_type".split()
)
_CASTS = frozenset("to type float double half bfloat16 cpu cuda".split())
_OF_ANOTHER = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})  # `x.to(param)` takes no value
_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag"})  # attributes that are more than shape and type


class _Sharded:
    """The class that stands in front of the one that a parameter has otherwise."""

    __slots__ = ()
    plain_class: type[nn.Parameter]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, is_attribute = _name_of(func)
        target = next(iter((*args, *kwargs.values())), None)  # nn.init gives all by name
        first: Any = target if isinstance(target, _Sharded) else None
        if first is not None and name in ("data", "detach"):
            return ShapeOnly(first, _text(first))
        if (
            first is not None
            and name in _CASTS
            and (given := _without_values(first, func, args[1:], kwargs)) is not None
        ):
            return given
        if first is not None and name == "set data":
            if args[1] is first:  # Module.to does so where a cast changed nothing
                return None
            raise StateError(_no_values(first, "param.data = ...", writes=True))
        if first is not None and name == "__repr__":
            return f"<{_text(first)}, sharded, of shape {tuple(first.shape)}>"
        # `param.view_as(param)` is how torch gets at the node that accumulates a gradient.
        of_another = name in _OF_ANOTHER and (first is None or (len(args) > 1 and args[1] is first))
        if name in _WITHOUT_VALUES or of_another or (is_attribute and name not in _VALUES):
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        for param in _sharded_in((args, kwargs)):
            written = target if isinstance(target, list | tuple) else (target,)
            writes = (_is_write(name) and any(param is one for one in written)) or param is kwargs.get("out")
            ask = getattr(_holder_of(param), "on_values", None)
            if ask is None or not ask(param, writes):
                raise StateError(_no_values(param, name, writes))
        return func(*args, **kwargs)


@functools.cache
def sharded_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a sharded parameter that is otherwise a `kind`."""
    body = {"__slots__": (), "__module__": kind.__module__, "plain_class": kind}
    return type(kind.__name__, (_Sharded, kind), body)


def plain_class(param: nn.Parameter) -> type[nn.Parameter]:
    """The class that `param` has while it is unsharded."""
    return param.plain_class if isinstance(param, _Sharded) else type(param)


# Inside, nobody is asked: for code of ours that looks at many parameters, and knows what it looks at.
asking_nobody = torch._C.DisableTorchFunctionSubclass


def asks_nobody(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function inside which sharded parameters are read and written without a question."""

    @functools.wraps(call)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with asking_nobody():
            return call(*args, **kwargs)

    return wrapper


def _name_of(func: Any) -> tuple[str, bool]:
    """A function's name, and whether it gets or sets an attribute."""
    name = getattr(func, "__name__", str(func))
    if name not in ("__get__", "__set__", "__delete__"):
        return name, False
    return ("" if name == "__get__" else "set ") + getattr(func.__self__, "__name__", ""), True


def _without_values(param: nn.Parameter, cast: Any, args: Any, kwargs: Any) -> Any:
    """Return what a cast gives that needs no values: the parameter, if it is so already, or its type; else None."""
    probe = torch.empty(1, dtype=param.dtype, device=param.device)
    with asking_nobody():
        given = cast(probe, *args, **kwargs)
    return param if given is probe else given if isinstance(given, str) else None


def _is_write(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _sharded_in(value: Any) -> Iterator[Any]:
    if isinstance(value, _Sharded):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sharded_in(item)


def _holder_of(param: nn.Parameter) -> Holder | None:
    return next((holder for holder in holders if any(mine is param for mine in holder.params)), None)


def _text(param: nn.Parameter) -> str:
    holder = _holder_of(param)
    return "a parameter" if holder is None else holder.name_of(param)


def _no_values(param: nn.Parameter, name: str, writes: bool) -> str:
    if name in ("__reduce_ex__", "__reduce__", "__deepcopy__"):
        return (
            f"{_text(param)} is sharded and cannot be pickled or saved by itself.\nOn all ranks call "
            "engine.save_checkpoint, model.save_pretrained or engine.full_state_dict(keep=rank == 0), or save inside "
            "`with hf_zero.gathered_params(model):`."
        )
    if writes:
        return (
            f"{_text(param)} was to be written to by {name} while it is sharded, and the write would be lost.\nWrite "
            "inside `with hf_zero.gathered_params(model, write_rank=0):`, or before the model is handed to hf_zero; "
            "whole tensors with hf_zero.set_full_param or engine.load_full_state_dict. To go on without hf_zero, call "
            "hf_zero.engine_of(model).teardown() on every rank."
        )
    return (
        f"{_text(param)} is sharded, and {name} needs its values.\nOn all ranks read it inside `with "
        "hf_zero.gathered_params(model):`, or take a copy with hf_zero.full_param. An average of weights is "
        "hf_zero.ShardedEMA."
    )
