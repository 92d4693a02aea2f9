"""The shape of a configuration: which keys there are at which depth, and what each may hold.

The rows themselves are in `resolved.py` (keys that are obeyed as they are) and `keys.py` (the others, and the blocks).
This file owns the row types, the fields that declare rows, the check of one value against its row, and the lookup of
rows and values by dotted path.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar

from hf_zero.config.problems import either

AUTO = "auto"

_LARGEST_FP32 = 2.0**128 - 2.0**104  # what training computes with
_NUMBER = re.compile(r"\s*[+-]?(\d{1,400}(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT])(I?)B?\s*", re.IGNORECASE)
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32", "float"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "torch.float16", "half"), "float16"),
}


class BadValue(ValueError):
    """A value does not fit its row; `str()` names what was expected."""


@dataclass(frozen=True)
class When:
    """What the effect of a key depends on beside its own value; conditions.py has them.

    `holds` gets a function from dotted path to resolved value; `otherwise` is the reason in the notice, with the stage
    for {stage}.
    """

    holds: Callable[[Callable[[str], Any]], bool]
    otherwise: str


@dataclass(frozen=True, kw_only=True)
class Key:
    """One row: the type of the value, its range, its default, whether "auto" may stand there, and its effect.

    `kind` is one of bool, int, interval (steps between two events; infinity is never, as 0), size (bytes), float,
    text, choice, dtype, texts (a list), floats (a number or a list), any.
    """

    kind: str
    default: Any = None
    low: float | None = None  # inclusive
    above: float | None = None  # exclusive
    high: float | None = None  # inclusive
    below: float | None = None  # exclusive
    choices: tuple[str, ...] = ()  # of choice
    offered: tuple[str, ...] = ()  # the choices that are obeyed and that messages name, where that is not all
    size: int | None = None  # of floats: the number of elements
    auto: bool = False
    # The key is obeyed unless one of these says otherwise.
    refused: str = ""  # what to do instead: the key is an error when it is on
    no_effect: str = ""  # why there is nothing to do: a value other than the default gives a notice
    when: tuple[When, ...] = ()  # where one does not hold, a value other than the default gives a notice

    def is_on(self, value: Any) -> bool:
        """Whether a checked value asks for more than the default does: what is refused of a refused key."""
        if self.kind == "bool":
            return value is (not self.default)
        if self.kind == "int":
            return isinstance(value, int) and value > max(self.default or 0, 0)
        if self.offered:
            return value is not None and value not in self.offered
        return value not in (None, self.default)

    def check(self, value: Any) -> Any:
        """The value in its canonical form (a number for "8", an int for 5e8, a tuple for a list of texts).

        Raises:
            BadValue: It has the wrong type or is out of range.
        """
        checked = _CHECKS[self.kind](self, value)
        if checked is _WRONG:
            given, bits = number(value), 63 if self.kind in ("int", "interval", "size") else 128
            too_large = self.high is None and given is not None and abs(given) >= 2**bits
            raise BadValue(f"{self.expected()}{f', less than 2 ** {bits}' if too_large else ''}")
        return checked

    def expected(self) -> str:
        """What may stand here, in words."""
        if self.kind == "int" and self.low is not None and self.high is not None and self.high - self.low < 10:
            words = either([str(number) for number in range(int(self.low), int(self.high) + 1)])
        elif self.kind == "choice":
            words = either([f'"{choice}"' for choice in self.offered or self.choices])
        elif self.kind == "floats":
            words = f"a list of {self.size} numbers" if self.size else "a number or a list of numbers"
            words += self._range()
        else:
            words = _NAMES[self.kind] + self._range()
        return f'{words}, or "auto"' if self.auto else words

    def _range(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"of at least {self.low:.12g}")
        if self.above is not None:
            parts.append(f"above {self.above:.12g}")
        if self.high is not None:
            parts.append(f"at most {self.high:.12g}")
        if self.below is not None:
            parts.append(f"below {self.below:.12g}")
        return f" {' and '.join(parts)}" if parts else ""

    def holds(self, number: float) -> bool:
        """Whether a number is finite and in the row's range."""
        return (
            abs(number) <= _LARGEST_FP32  # false for infinities and NaN
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
            and (self.below is None or number < self.below)
        )


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Another name of a key. `target` is a dotted path from the top; `convert` maps a value, None drops it."""

    target: str
    kind: str = ""  # "" takes the target's own type
    convert: Mapping[Any, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Block:
    """An object of the configuration.

    `free`: names that are not in `keys` pass unchecked. `always`: its defaults belong to every resolved configuration;
    the other blocks appear there only when the user wrote them.
    """

    keys: Mapping[str, Entry]
    free: bool = False
    always: bool = False
    refused: str = ""  # as of Key, for everything inside
    no_effect: str = ""

    def is_on(self, value: Any) -> bool:
        """Whether a block asks for something: by a key of `keys` that is on, or, where there are none, by standing
        there without `"enabled": false`."""
        if not isinstance(value, Mapping):
            return False
        if not self.keys:
            return bool(value) and value.get("enabled") is not False
        return any(row.is_on(value.get(name)) for name, row in self.keys.items() if not isinstance(row, Alias))


Entry = Key | Alias | Block
_Row = TypeVar("_Row", Key, Block)


def refused(row: _Row, instead: str) -> _Row:
    """A row of something that this release does not do; `instead` is the remedy in the error."""
    return replace(row, refused=instead)


def no_effect(row: _Row, why: str) -> _Row:
    """A row that is taken and has nothing to do here; `why` stands in the notice."""
    return replace(row, no_effect=why)


def refused_block(instead: str, **switches: Entry) -> Block:
    """A block that is refused by its name when it is on (see `Block.is_on`). Only its switches are checked."""
    return Block(keys=switches, free=True, refused=instead)


def flag(default: bool | None = False, *, auto: bool = False) -> Key:
    return Key(kind="bool", default=default, auto=auto)


def count(default: float | None = None, *, low: float = 0, high: float | None = None, auto: bool = False) -> Key:
    return Key(kind="int", default=None if default is None else int(default), low=low, high=high, auto=auto)


def size() -> Key:
    """Bytes: a number, or a text with a unit."""
    return Key(kind="size", low=1)


def interval() -> Key:
    return Key(kind="interval", default=0, low=0)


def real(
    default: float | None = None,
    *,
    low: float | None = 0,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    auto: bool = False,
) -> Key:
    return Key(kind="float", default=default, low=low, above=above, high=high, below=below, auto=auto)


def text(default: str | None = None) -> Key:
    return Key(kind="text", default=default)


def choice(default: str | None, *choices: str, auto: bool = False) -> Key:
    return Key(kind="choice", default=default, choices=choices, auto=auto)


def dtype() -> Key:
    return Key(kind="dtype")


def texts(*default: str, auto: bool = False) -> Key:
    return Key(kind="texts", default=default, auto=auto)


def floats(
    *, size: int | None = None, low: float | None = None, below: float | None = None, auto: bool = False
) -> Key:
    return Key(kind="floats", size=size, low=low, below=below, auto=auto)


def anything() -> Key:
    return Key(kind="any")


def only(row: Key, *when: When) -> Key:
    """A row whose key has an effect under these conditions only."""
    return replace(row, when=when)


def key(row: Key, name: str = "", *, when: When | tuple[When, ...] = ()) -> Any:
    """A field of a section with the value of the key `name`, which is the field's own name where none is given."""
    row = only(row, *((when,) if isinstance(when, When) else when))
    return field(default=row.default, metadata={"row": row, "name": name})


def rows_of(section: type[Any], *when: When) -> dict[str, Entry]:
    """The rows and blocks that the fields of a section declare, the rows under these conditions."""
    return {
        name: only(entry, *entry.when, *when) if isinstance(entry, Key) else Block(always=True, keys=rows_of(entry))
        for _, name, entry in _declared(section)
    }


def values_of(section: type[Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """The values of those fields in a resolved block; its other keys are refused, or there is nothing to do."""
    return {
        attribute: block[name] if isinstance(entry, Key) else entry(**values_of(entry, block[name]))
        for attribute, name, entry in _declared(section)
    }


def _declared(section: type[Any]) -> Iterator[tuple[str, str, Any]]:
    """Of each field that declares something: its attribute, the name in the file, and the row or the inner section."""
    for one in fields(section):
        name = one.metadata.get("name") or one.name
        if "row" in one.metadata:
            yield one.name, name, one.metadata["row"]
        elif one.default_factory is not MISSING:
            yield one.name, name, one.default_factory


def find(root: Block, path: str) -> Entry | None:
    """The row at a dotted path, or None."""
    entry: Entry = root
    for name in path.split("."):
        if not isinstance(entry, Block) or name not in entry.keys:
            return None
        entry = entry.keys[name]
    return entry


def walk(block: Block, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """Every row below `block` with its dotted path, in the order of the tables, a block before its contents."""
    for name, entry in block.keys.items():
        yield f"{prefix}{name}", entry
        if isinstance(entry, Block):
            yield from walk(entry, f"{prefix}{name}.")


def look_up(values: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path of nested mappings, or `default`."""
    node: Any = values
    for name in path.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return default
        node = node[name]
    return node


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, making the blocks on the way."""
    *blocks, last = path.split(".")
    for name in blocks:
        values = values.setdefault(name, {})
    values[last] = value


def number(value: Any) -> float | int | None:
    """A number, whether written as one or as text ("8", "1e-5"); None for anything else, true and false included."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value) if re.search(r"[.eE]", value) else int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value


_WRONG: Any = object()


def _check_bool(key: Key, value: Any) -> Any:
    return value if isinstance(value, bool) else _WRONG


def _check_int(key: Key, value: Any) -> Any:
    given = number(value)
    if given is None or not key.holds(given) or given != int(given) or abs(given) > sys.maxsize:
        return _WRONG
    return int(given)


def _check_size(key: Key, value: Any) -> Any:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return _check_int(key, value)
    unit = (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper())
    return _check_int(key, int(float(match[1]) * unit))


def _check_interval(key: Key, value: Any) -> Any:
    endless = value.strip().lower() in ("inf", "infinity") if isinstance(value, str) else value == math.inf
    return 0 if endless else _check_int(key, value)


def _check_float(key: Key, value: Any) -> Any:
    given = number(value)
    return _WRONG if given is None or not key.holds(given) else float(given)


def _check_text(key: Key, value: Any) -> Any:
    return value if isinstance(value, str) and "\0" not in value else _WRONG  # no path has a null byte


def _check_choice(key: Key, value: Any) -> Any:
    by_lower = {choice.lower(): choice for choice in key.choices}
    return by_lower.get(value.lower(), _WRONG) if isinstance(value, str) else _WRONG


def _check_dtype(key: Key, value: Any) -> Any:
    return _DTYPES.get(value.lower(), _WRONG) if isinstance(value, str) else _WRONG


def _check_texts(key: Key, value: Any) -> Any:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        return _WRONG
    return tuple(items)


def _check_floats(key: Key, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return _WRONG if key.size else _check_float(key, value)
    items = [number(item) for item in value]
    if len(items) != (key.size or max(len(items), 1)):
        return _WRONG
    if not all(item is not None and key.holds(item) for item in items):
        return _WRONG
    return [float(item) for item in items if item is not None]


def _check_any(key: Key, value: Any) -> Any:
    return value


_CHECKS = {
    "bool": _check_bool,
    "int": _check_int,
    "interval": _check_interval,
    "size": _check_size,
    "float": _check_float,
    "text": _check_text,
    "choice": _check_choice,
    "dtype": _check_dtype,
    "texts": _check_texts,
    "floats": _check_floats,
    "any": _check_any,
}
_NAMES = {
    "bool": "true or false",
    "int": "an integer",
    "interval": "an integer",
    "size": 'a size such as "4GB", "512MiB" or a number of bytes',
    "float": "a number",
    "text": "a text",
    "dtype": '"fp32", "bf16" or "fp16"',
    "texts": "a text or a list of texts",
    "any": "anything",
}
