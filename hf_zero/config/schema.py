"""The shape of a configuration: which keys there are at which depth, and what each may hold.

The entries themselves are in `resolved.py` (keys that are obeyed as they are), `keys.py` (the others), and beside the
classes that are chosen by a key (`keys.DECLARED`). This file owns the types of keys with their checks, and the
lookup of entries and values by dotted path.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

AUTO = "auto"

_LARGEST_FP32 = 2.0**128 - 2.0**104  # what training computes with
_NUMBER = re.compile(r"\s*[+-]?(\d{1,400}(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT])(I?)B?\s*", re.IGNORECASE)
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32", "float"), "float32"),
    **dict.fromkeys(("bf16", "bfp16", "bfloat16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "torch.float16", "half"), "float16"),
}
_WRONG: Any = object()  # a value that does not fit its key

Get = Callable[[str], Any]  # the resolved value at a dotted path, or None; a fact of the run


class BadValue(ValueError):
    """A value does not fit its key; `str()` names what was expected."""


class Conflict(NamedTuple):
    """The value of `key` does not go with others."""

    key: str
    wrong: str
    remedy: str


@dataclass(frozen=True)
class When:
    """A condition that the effect of a key depends on beside its own value; conditions.py has them.

    `holds` gets a function from dotted path to resolved value; `otherwise` is the reason in the notice, with the stage
    for {stage}.
    """

    holds: Callable[[Get], bool]
    otherwise: str


@dataclass(frozen=True)
class Key:
    """The declaration of one key: its default, help and conditions. A subclass is a type of values."""

    default: Any = None
    _: KW_ONLY
    help: str = ""  # one sentence: what the key does, with the unit of its value
    auto: bool = False  # "auto" may stand there
    # The key is obeyed unless one of these says otherwise.
    refused: str = ""  # what to do instead: the key is an error when it is on
    no_effect: str = ""  # why there is nothing to do: a value other than the default gives a notice
    when: tuple[When, ...] = ()  # where one does not hold, a value other than the default gives a notice

    words: ClassVar[str] = "anything"

    def is_on(self, value: Any) -> bool:
        """Whether a checked value asks for more than the default does: what is refused of a refused key."""
        return value not in (None, self.default)

    def check(self, value: Any) -> Any:
        """The value in its canonical form (a number for "8", an int for 5e8, a tuple for a list of texts).

        Raises:
            BadValue: It has the wrong type or is out of range.
        """
        checked = self._canonical(value)
        if checked is _WRONG:
            raise BadValue(self.expected() + self._too_large(value))
        return checked

    def expected(self) -> str:
        """The values that may stand here, in words."""
        words = self._in_words()
        return f'{words}, or "auto"' if self.auto else words

    def _canonical(self, value: Any) -> Any:
        return value

    def _in_words(self) -> str:
        return self.words

    def _too_large(self, value: Any) -> str:
        return ""


class Flag(Key):
    """A flag is true or false."""

    words = "true or false"

    def is_on(self, value: Any) -> bool:
        return value is (not self.default)

    def _canonical(self, value: Any) -> Any:
        return bool(value) if isinstance(value, int) and value in (0, 1) else _WRONG  # as DeepSpeed takes them


class Text(Key):
    """A text without null bytes, which no path has."""

    words = "a text"

    def _canonical(self, value: Any) -> Any:
        return value if isinstance(value, str) and "\0" not in value else _WRONG


@dataclass(frozen=True)
class Texts(Key):
    """A tuple of texts, written as a text or a list of texts."""

    default: Any = ()

    words = "a text or a list of texts"

    def _canonical(self, value: Any) -> Any:
        items = (value,) if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
            return _WRONG
        return tuple(items)


class DType(Key):
    """The name of one of torch's floating types."""

    words = '"fp32", "bf16" or "fp16"'

    def _canonical(self, value: Any) -> Any:
        return DTYPES.get(value.lower(), _WRONG) if isinstance(value, str) else _WRONG


@dataclass(frozen=True)
class Choice(Key):
    """One of several texts, in any case."""

    _: KW_ONLY
    choices: tuple[str, ...]
    offered: tuple[str, ...] = ()  # the choices that are obeyed and that messages name, where that is not all

    def is_on(self, value: Any) -> bool:
        return value is not None and value not in self.offered if self.offered else super().is_on(value)

    def _canonical(self, value: Any) -> Any:
        by_lower = {choice.lower(): choice for choice in self.choices}
        return by_lower.get(value.lower(), _WRONG) if isinstance(value, str) else _WRONG

    def _in_words(self) -> str:
        return either([f'"{choice}"' for choice in self.offered or self.choices])


@dataclass(frozen=True)
class Real(Key):
    """A finite number in a range."""

    _: KW_ONLY
    low: float | None = 0  # inclusive
    above: float | None = None  # exclusive
    high: float | None = None  # inclusive
    below: float | None = None  # exclusive

    words = "a number"
    bits: ClassVar[int] = 128  # a number of that many is told that it is too large

    def holds(self, number: float) -> bool:
        """Whether a number is finite and in the key's range."""
        return (
            abs(number) <= _LARGEST_FP32  # false for infinities and NaN
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
            and (self.below is None or number < self.below)
        )

    def _canonical(self, value: Any) -> Any:
        given = number(value)
        return _WRONG if given is None or not self.holds(given) else float(given)

    def _in_words(self) -> str:
        bounds = {"of at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        listed = [f"{words} {bound:.12g}" for words, bound in bounds.items() if bound is not None]
        return f"{self.words} {' and '.join(listed)}" if listed else self.words

    def _too_large(self, value: Any) -> str:
        given = number(value)
        too_large = self.high is None and given is not None and abs(given) >= 2**self.bits
        return f", less than 2 ** {self.bits}" if too_large else ""


class Count(Real):
    """An integer in a range; 5e8 and "8" are integers too."""

    words = "an integer"
    bits = 63

    def is_on(self, value: Any) -> bool:
        return isinstance(value, int) and value > max(self.default or 0, 0)

    def _canonical(self, value: Any) -> Any:
        given = number(value)
        if given is None or not self.holds(given) or given != int(given) or abs(given) > sys.maxsize:
            return _WRONG
        return int(given)

    def _in_words(self) -> str:
        if self.low is not None and self.high is not None and self.high - self.low < 10:
            return either([str(number) for number in range(int(self.low), int(self.high) + 1)])
        return super()._in_words()


class RankGroup(Count):
    """A number of ranks that form a group, or which ones do: "all" or those of a "host"."""

    words = '"all", "host" or a number of ranks'

    def is_on(self, value: Any) -> bool:
        return value not in (None, self.default)

    def _canonical(self, value: Any) -> Any:
        if isinstance(value, str) and value.lower() in ("all", "host"):
            return value.lower()
        count = super()._canonical(value)
        return count if count is _WRONG or count > 0 else _WRONG

    def _in_words(self) -> str:
        return self.words


class Interval(Count):
    """The number of steps between two events; infinity is never, as 0 is."""

    def _canonical(self, value: Any) -> Any:
        endless = value.strip().lower() in ("inf", "infinity") if isinstance(value, str) else value == math.inf
        return 0 if endless else super()._canonical(value)


class Size(Count):
    """A number of bytes, or a text with a unit."""

    words = 'a size such as "4GB", "512MiB" or a number of bytes'

    def _canonical(self, value: Any) -> Any:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return super()._canonical(value)
        unit = (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper())
        return super()._canonical(int(float(match[1]) * unit))


@dataclass(frozen=True)
class Reals(Real):
    """A list of `size` numbers; without a size, a list of any length or one number."""

    _: KW_ONLY
    size: int | None = None

    def _canonical(self, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return _WRONG if self.size else super()._canonical(value)
        items = [number(item) for item in value]
        if len(items) != (self.size or max(len(items), 1)):
            return _WRONG
        if not all(item is not None and self.holds(item) for item in items):
            return _WRONG
        return [float(item) for item in items if item is not None]

    def _in_words(self) -> str:
        words = f"a list of {self.size} numbers" if self.size else "a number or a list of numbers"
        return words + super()._in_words().removeprefix(self.words)


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Another name of a key. `target` is a dotted path from the top; `convert` maps a flag to its value or None."""

    target: str
    convert: Mapping[bool, Any] | None = None
    off: int | None = None  # under this name, this number asks for nothing


@dataclass(frozen=True, kw_only=True)
class Block:
    """An object of the configuration, between braces.

    `free`: names that are not in `keys` pass unchecked. `always`: its defaults belong to every resolved configuration;
    the other blocks appear there only when the user wrote them. `conflicts` yields what only shows when several keys
    are seen together.
    """

    keys: Mapping[str, Entry]
    free: bool = False
    always: bool = False
    refused: str = ""  # as of Key, for everything inside
    no_effect: str = ""
    conflicts: Callable[[Get], Iterator[Conflict]] | None = None

    def is_on(self, value: Any) -> bool:
        """Whether a block asks for something: by a key of `keys` that is on, or, where there are none, by standing
        there without `"enabled": false`."""
        if not isinstance(value, Mapping):
            return False
        if not self.keys:
            return bool(value) and value.get("enabled") is not False
        return any(entry.is_on(value.get(name)) for name, entry in self.keys.items() if not isinstance(entry, Alias))


Entry = Key | Alias | Block
_Section = TypeVar("_Section")


def refused_block(instead: str, **switches: Entry) -> Block:
    """A block that is refused by its name when it is on (see `Block.is_on`). Only its switches are checked."""
    return Block(keys=switches, free=True, refused=instead)


def key(help: str, entry: Key, name: str = "") -> Any:
    """A field of a section with the value of the key `name`, which is the field's own name where none is given."""
    return field(default=entry.default, metadata={"entry": replace(entry, help=help), "name": name})


def keys_of(section: type[Any], *when: When) -> dict[str, Entry]:
    """The keys and blocks that the fields of a section declare, the keys under these conditions too."""
    return {
        name: replace(entry, when=(*entry.when, *when))
        if isinstance(entry, Key)
        else Block(always=True, keys=keys_of(entry))
        for _, name, entry in _declared(section)
    }


def values_of(section: type[_Section], block: Mapping[str, Any]) -> dict[str, Any]:
    """The values of those fields in a resolved block; its other keys are refused, or there is nothing to do."""
    return {
        attribute: block[name] if isinstance(entry, Key) else entry(**values_of(entry, block[name]))
        for attribute, name, entry in _declared(section)
    }


def section_of(section: type[_Section], block: str, get: Get) -> _Section:
    """A section of the values at its dotted paths, with its own defaults for those that are None or "auto"."""
    given = {attribute: get(f"{block}.{name}") for attribute, name, _ in _declared(section)}
    return section(**{attribute: value for attribute, value in given.items() if value not in (None, AUTO)})


def _declared(section: type[Any]) -> Iterator[tuple[str, str, Any]]:
    """Each field that declares something: its attribute, the name in the file, and the key or the inner section."""
    for one in fields(section):
        name = one.metadata.get("name") or one.name
        if "entry" in one.metadata:
            yield one.name, name, one.metadata["entry"]
        elif one.default_factory is not MISSING:
            yield one.name, name, one.default_factory


def find(root: Block, path: str) -> Entry | None:
    """The entry at a dotted path, or None."""
    entry: Entry = root
    for name in path.split("."):
        if not isinstance(entry, Block) or name not in entry.keys:
            return None
        entry = entry.keys[name]
    return entry


def walk(block: Block, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """Every entry below `block` with its dotted path, in the order of declaration, a block before its contents."""
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


def show(value: Any, longest: int = 80) -> str:
    """A value as it stands in JSON, cut to a length that keeps the message readable."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def either(choices: Sequence[str]) -> str:
    """`a, b or c`."""
    if len(choices) < 2:
        return "".join(choices)
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
