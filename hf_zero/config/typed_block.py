"""Blocks whose `type` names a class and whose `params` are its arguments: `optimizer` and `scheduler`.

The types are declared beside the classes. This file owns what a type declares, and the lookup of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_zero.config.schema import Block, Choice, Entry, show


@dataclass(frozen=True)
class Fault:
    """One mistake in the parameter `name` of a type."""

    name: str
    value: Any
    wrong: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} = {show(self.value)}: {self.wrong}.\n   {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Type:
    """One value of `type`.

    Args:
        params: Its parameters, which are keys.
        required: The parameters without a default -> what to write.
        not_taken: Parameters that its class does not take: they change nothing, or other values are refused.
        form: Its block as the class has it, made of its name and parameters; the same without `not_taken` by default.
        refused: It is refused by its name, so its parameters are not checked: the name is the mistake to mend.
    """

    params: Mapping[str, Entry] = field(default_factory=dict)
    required: Mapping[str, str] = field(default_factory=dict)
    not_taken: frozenset[str] = frozenset()
    form: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None
    refused: bool = False

    def block(self, name: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """A block of this type in the form of its class: `{"type": ..., "params": ...}`."""
        if self.form is not None:
            return self.form(name, dict(params))
        return {"type": name, "params": {key: one for key, one in params.items() if key not in self.not_taken}}


@dataclass(frozen=True, kw_only=True)
class TypedBlock(Block):
    """A block with a `type`.

    Args:
        missing: What to do where the type is missing.
        faults: The mistakes in the parameters of a type, each of which fits its key; "auto" stands for a value that is
            not known yet.
    """

    types: Mapping[str, Type]
    missing: str
    faults: Callable[[str, Mapping[str, Any]], Iterator[Fault]] | None = None

    def type_of(self, name: Any) -> Type | None:
        """The type of this name, in any case."""
        by_lower = {known.lower(): one for known, one in self.types.items()}
        return by_lower.get(name.lower()) if isinstance(name, str) else None

    def params_of(self, name: Any) -> Block:
        """The keys of `params` beside this `type`: those of all types if there is no such type."""
        one = self.type_of(name)
        if one is None:
            return Block(keys=_all_params(self.types))
        return Block(keys={}, free=True) if one.refused else Block(keys=one.params)


def type_keys(types: Mapping[str, Type], *, help: str, instead: str = "") -> dict[str, Entry]:
    """The keys `type` and `params`. `instead` is the remedy for the types that are refused."""
    offered = tuple(name for name, one in types.items() if not one.refused) if instead else ()
    kind = Choice(choices=tuple(types), offered=offered, refused=instead, help=help)
    return {"type": kind, "params": Block(keys=_all_params(types))}


def _all_params(types: Mapping[str, Type]) -> dict[str, Entry]:
    """Every parameter of every type. If types declare a name differently, the first one's stands."""
    params: dict[str, Entry] = {}
    for one in types.values():
        params |= {name: entry for name, entry in one.params.items() if name not in params}
    return params
