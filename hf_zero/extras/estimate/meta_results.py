"""Operations on meta tensors, run once for each kind of input: every layer of a model asks for the same sizes again.

On the meta device an operation costs Python time only, most of it for the sizes, types and strides of its result.
These follow from the sizes, types and strides of the inputs and from the other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Operations in place that change no size, beside those that torch calls pointwise.
_IN_PLACE = {"aten::copy_", "aten::zero_", "aten::fill_"}


class MetaResults:
    """Calls operations, and makes the result of one that was called alike before from the sizes that it had.

    What is remembered: an operation in place that changes no sizes, and one whose results share memory with nothing.
    All others, and all with inputs that have values or complex numbers, are called every time.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, Callable[[Sequence[Any]], Any]] = {}
        self._may: dict[Any, bool] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what `func(*args, **kwargs)` returns."""
        if (may := self._may.get(func)) is None:
            may = self._may[func] = _is_fresh(func) or _is_in_place(func)
        key = _key(func, args, kwargs) if may else None
        if key is None:
            return func(*args, **kwargs)
        if (again := self._seen.get(key)) is not None:
            return again(args)
        result = func(*args, **kwargs)
        if (again := _first if _is_in_place(func) else _maker(result)) is not None:
            self._seen[key] = again
        return result


def _is_fresh(func: Any) -> bool:
    return all(one.alias_info is None for one in (*func._schema.arguments, *func._schema.returns))


def _is_in_place(func: Any) -> bool:
    written = [one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments]
    if not written or not written[0] or any(written[1:]) or len(func._schema.returns) != 1:
        return False
    return func._schema.name in _IN_PLACE or torch.Tag.pointwise in func.tags


def _key(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what the sizes of the result follow from; None where that is not known."""
    parts: list[Any] = [func]
    for group in (args, *kwargs.items()):
        if not _add(parts, group):
            return None
    return tuple(parts)


def _add(parts: list[Any], value: Any) -> bool:
    """Append `value` as it counts in a key; False if it cannot."""
    kind = type(value)
    if kind in _TENSORS:
        parts += (value.shape, value.stride(), value.dtype)
        return bool(value.is_meta) and not value.is_complex()
    if kind in (list, tuple):
        parts.append(len(value))
        return all(_add(parts, one) for one in value)
    parts += (kind, value)  # with its type: 1, 1.0 and True are equal
    return kind in _PLAIN


def _first(args: Sequence[Any]) -> Any:
    return args[0]


def _maker(result: Any) -> Callable[[Sequence[Any]], Any] | None:
    """Return what makes a result with these sizes; None where a tensor has memory that its sizes do not tell."""
    tensors = result if isinstance(result, tuple) else (result,)
    if not all(map(_has_plain_memory, tensors)):
        return None
    specs: list[_Spec] = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
    if isinstance(result, tuple):
        return lambda _: tuple(map(_empty, specs))
    return lambda _: _empty(specs[0])


def _empty(spec: _Spec) -> torch.Tensor:
    return torch.empty_strided(spec[0], spec[1], dtype=spec[2], device="meta")


def _has_plain_memory(tensor: Any) -> bool:
    if type(tensor) is not torch.Tensor or not tensor.is_meta or tensor.is_complex() or tensor.storage_offset():
        return False
    alike = _empty((tensor.shape, tensor.stride(), tensor.dtype))
    return tensor.untyped_storage().nbytes() == alike.untyped_storage().nbytes()
