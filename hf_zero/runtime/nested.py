"""Tensors inside the nested values that modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

# Most of what modules take beside tensors; to ask whether it is a container takes longer.
_PLAIN = (bool, int, float, str)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, mappings and dataclasses, and in the attributes of any other object."""
    if not _is_container(value) and not isinstance(value, torch.nn.Module | type):
        # One level only: what a forward returns in a class of its own, but not all that hangs on it.
        value = list(getattr(value, "__dict__", {}).values())
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            yield value
        else:
            left.extend(reversed(_items(value)))


def _is_container(value: Any) -> bool:
    return isinstance(value, torch.Tensor | Mapping | list | tuple) or dataclasses.is_dataclass(value)


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    if value is None or isinstance(value, _PLAIN):
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return ()


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested lists, tuples and dicts with `change` applied to every tensor; other values as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def replace_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to every tensor that `tensors_in` finds.

    Tuples are made anew; mappings, lists and dataclasses (transformers' ModelOutput is both) get their items in place.
    """
    if _is_container(value) or isinstance(value, torch.nn.Module | type):
        return _replace_in_containers(value, change)
    for name, item in list(getattr(value, "__dict__", {}).items()):
        value.__dict__[name] = _replace_in_containers(item, change)
    return value


def _replace_in_containers(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [_replace_in_containers(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        value[:] = [_replace_in_containers(item, change) for item in value]
    elif isinstance(value, MutableMapping):
        for key, item in list(value.items()):
            value[key] = _replace_in_containers(item, change)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            object.__setattr__(value, field.name, _replace_in_containers(getattr(value, field.name), change))
    return value
