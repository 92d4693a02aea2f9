"""Operations on meta tensors, run once for each kind of input: every layer of a model asks for the same sizes again.

On the meta device an operation costs Python time only, most of it for the sizes, types and strides of its result.
These follow from the sizes, types and strides of the inputs and from the other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Operations that torch does itself in less time than it takes to look up what they gave before.
_CHEAP = {"aten::empty", "aten::empty_strided", "aten::copy_", "aten::zero_", "aten::fill_"}


# Makes the result of an operation from its arguments, (args, kwargs).
_Again = Callable[[Sequence[Any], Mapping[str, Any]], Any]


class MetaResults:
    """Calls operations, and makes the result of one that was called alike before from the sizes that it had.

    What is remembered: an operation that writes to one tensor and changes no sizes, and one whose results share memory
    with nothing. All others, and all with inputs that have values or complex numbers, are called every time.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, _Again] = {}
        self._makers: dict[Any, Callable[[Any], _Again | None] | None] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what `func(*args, **kwargs)` returns."""
        try:
            maker = self._makers[func]
        except KeyError:
            maker = self._makers[func] = _maker_of(func)
        key = _key(func, args, kwargs) if maker is not None else None
        if maker is None or key is None:
            return func(*args, **kwargs)
        if (again := self._seen.get(key)) is not None:
            return again(args, kwargs)
        before = _sizes_of_out(kwargs)
        result = func(*args, **kwargs)
        if before == _sizes_of_out(kwargs) and (again := maker(result)) is not None:
            self._seen[key] = again
        return result


def _maker_of(func: Any) -> Callable[[Any], _Again | None] | None:
    """Return what remembers a result of `func`; None where none may be remembered."""
    arguments, returns = func._schema.arguments, func._schema.returns
    if func._schema.name in _CHEAP:
        return None
    if all(one.alias_info is None for one in (*arguments, *returns)):
        return _maker
    written = [one.alias_info is not None and one.alias_info.is_write for one in arguments]
    if sum(written) != 1 or len(returns) != 1:
        return None
    if written[0] and torch.Tag.pointwise in func.tags:
        return lambda _: _first
    if torch.Tag.out in func.tags and arguments[written.index(True)].name == "out":
        return lambda _: _out
    return None


def _sizes_of_out(kwargs: Mapping[str, Any]) -> Any:
    return _spec(kwargs["out"]) if isinstance(kwargs.get("out"), torch.Tensor) else None


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


def _first(args: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return args[0]


def _out(_: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kwargs["out"]


def _maker(result: Any) -> _Again | None:
    """Return what makes a result with these sizes; None where a tensor has memory that its sizes do not tell."""
    tensors = result if isinstance(result, tuple) else (result,)
    if not all(map(_has_plain_memory, tensors)):
        return None
    specs = list(map(_spec, tensors))
    if isinstance(result, tuple):
        return lambda *_: tuple(map(_empty, specs))
    return lambda *_: _empty(specs[0])


def _spec(tensor: torch.Tensor) -> _Spec:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(spec: _Spec) -> torch.Tensor:
    return torch.empty_strided(spec[0], spec[1], dtype=spec[2], device="meta")


def _has_plain_memory(tensor: Any) -> bool:
    if type(tensor) is not torch.Tensor or not tensor.is_meta or tensor.is_complex() or tensor.storage_offset():
        return False
    alike = _empty(_spec(tensor))
    return tensor.untyped_storage().nbytes() == alike.untyped_storage().nbytes()
