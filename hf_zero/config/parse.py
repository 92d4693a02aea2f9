"""Reads a configuration from a file, a JSON string or a dict and checks every key at every depth.

Nothing is decided here that needs the model, the training arguments or the number of ranks: "auto" is kept, and keys
that this release does not obey pass (`resolve.py` refuses them).
"""

from __future__ import annotations

import base64
import binascii
import copy
import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.config import jsonc
from hf_zero.config.keys import UNREAD, root
from hf_zero.config.problems import LIKENESS_ELSEWHERE, Problem, Problems, advice, nearest
from hf_zero.config.schema import (
    AUTO,
    Alias,
    BadValue,
    Block,
    Choice,
    Count,
    Entry,
    Flag,
    Key,
    Real,
    find,
    look_up,
    put,
    show,
)
from hf_zero.config.typed_block import TypedBlock
from hf_zero.errors import ConfigError

# Members of this name are comments, at any depth.
COMMENTS = ("_comment", "$schema", "//", "#")
EXAMPLE = '{"zero_optimization": {"stage": 3}}'
_WHAT_TO_GIVE = f"Give the path of a JSON file, a JSON string, or a dict, such as {EXAMPLE}."
# "500MB", "10 min", "5e8 elements", "80%"
_WITH_UNIT = re.compile(r"\s*[+-]?[\d_.]+([eE][+-]?\d+)?\s*[a-zA-Z%]+\s*")


@dataclass(frozen=True)
class Parsed:
    """A configuration that was read: `values` has canonical names and types, and "auto" where it was written."""

    source: str  # for messages: the file's path, "a dict" or "a JSON string"
    raw: dict[str, Any]  # as the user gave it
    values: dict[str, Any]  # nested as in the file; keys with problems are left out
    lines: Mapping[str, int] = field(default_factory=dict)  # dotted path -> line
    problems: tuple[Problem, ...] = ()
    notices: tuple[str, ...] = ()  # deprecated names that were used


def parse(source: str | os.PathLike[str] | Mapping[str, Any]) -> Parsed:
    """Read and check a configuration; mistakes in keys and values are in `.problems`.

    Raises:
        ConfigError: There is no such file, or it is not JSON: then there are no keys to check.
    """
    if isinstance(source, Mapping):
        raw = copy.deepcopy(dict(source))
        return _check(raw, jsonc.Document(raw), "a dict")
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"A ZeRO configuration of type {type(source).__name__} was given: {show(source)}.\n{_WHAT_TO_GIVE}"
        )
    text, name = _text_of(source)
    if jsonc.skip_blank(text) == len(text):
        raise ConfigError(f"The ZeRO configuration ({name}) is empty.\nWrite at least the stage: {EXAMPLE}.")
    try:
        document = _from_hjson(text, name) if _is_hjson(text, name) else jsonc.loads(text)
    except jsonc.JsonError as error:
        raise ConfigError(f"The ZeRO configuration ({name}) is not JSON: {error}.\nCorrect it there.") from None
    except RecursionError:
        raise ConfigError(
            f"The ZeRO configuration ({name}) is nested too deeply to be one.\nBlocks go four deep."
        ) from None
    if not isinstance(document.value, dict):
        raise ConfigError(
            f"The ZeRO configuration ({name}) is {show(document.value)}, not an object.\n"
            f"Write the keys between braces, such as {EXAMPLE}."
        )
    return _check(document.value, document, name)


def _is_hjson(text: str, name: str) -> bool:
    """Whether it is Hjson, as DeepSpeed reads every file: by its name, or by a first key without quotes."""
    start = jsonc.skip_blank(text)
    first = text[jsonc.skip_blank(text, start + 1) :][:1] if text[start] == "{" else ""
    return name.endswith(".hjson") or first.isalpha()


def _from_hjson(text: str, name: str) -> jsonc.Document:
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        raise ConfigError(f"{name} is read by the package hjson, which is not installed: pip install hjson.") from None
    try:
        return jsonc.Document(hjson.loads(text, object_pairs_hook=_without_duplicates))
    except (hjson.HjsonDecodeError, _Duplicate) as error:
        raise ConfigError(f"The ZeRO configuration ({name}) is not Hjson: {error}.\nCorrect it there.") from None


class _Duplicate(ValueError):
    """A key stands twice in an object."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for number, (name, _) in enumerate(pairs):
        if any(name == other for other, _ in pairs[:number]):
            raise _Duplicate(f"{name} stands twice")
    return dict(pairs)


def _text_of(source: str | os.PathLike[str]) -> tuple[str, str]:
    """The JSON text of a path, a JSON string or a base64 string, and what to call it."""
    if isinstance(source, str):
        text = source.removeprefix("\ufeff")
        start = jsonc.skip_blank(text)
        if start == len(text) or text[start] in "{[":
            return text, "a JSON string"
    path = Path(source)
    try:
        return path.read_text(encoding="utf-8-sig"), str(path)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The ZeRO configuration ({path}) is not text in UTF-8: {error.reason} at byte {error.start}.\n"
            "Save it as UTF-8."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        decoded = _from_base64(os.fspath(source))
        if decoded is not None:
            return decoded, "a base64 string"
        raise ConfigError(_unreadable(path, error)) from None


def _from_base64(text: str) -> str | None:
    """accelerate passes configurations on as URL-safe base64 of JSON; the plain alphabet is taken as well."""
    plain = text.strip().translate(str.maketrans("-_", "+/"))
    try:
        decoded = base64.b64decode(plain, validate=True).decode("utf-8-sig")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded[jsonc.skip_blank(decoded) :].startswith("{") else None


def _unreadable(path: Path, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    # Room for long paths, whose names stand at the end; what is no path at all is cut.
    message = f"The ZeRO configuration {show(str(path), longest=400)} cannot be read: {reason}."
    try:
        beside = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix == ".json")
    except OSError:
        beside = []
    other = nearest(path.name, beside)
    if other is not None and other != path.name:
        message += f" The folder has {other}."
    return f"{message}\n{_WHAT_TO_GIVE}"


def _check(raw: dict[str, Any], document: jsonc.Document, name: str) -> Parsed:
    checker = _Checker(name, document.lines)
    for path, line in document.duplicates:
        checker.problems.add_text(
            path,
            f"{path} stands twice, at line {document.lines[path]} and at line {line}: expected once.",
            "Remove one of them.",
        )
    checker.block(root(), raw, "")
    return Parsed(
        source=name,
        raw=raw,
        values=checker.values,
        lines=document.lines,
        problems=tuple(checker.problems.found),
        notices=tuple(checker.notices),
    )


class _Checker:
    """Goes through the user's blocks, fills `values` with what is right and `problems` with what is not."""

    def __init__(self, source: str, lines: Mapping[str, int]) -> None:
        self.problems = Problems(source, lines)
        self.values: dict[str, Any] = {}
        self.notices: list[str] = []
        self._given: dict[str, str] = {}  # canonical path -> the path it was given under

    def block(self, known: Block, data: Mapping[str, Any], path: str, written: str | None = None) -> None:
        """Check a block that is canonically at `path` and was written at `written`."""
        written = path if written is None else written
        for name, value in data.items():
            here = f"{path}.{name}" if path else str(name)
            where = f"{written}.{name}" if written else str(name)
            if isinstance(name, str) and name.startswith(COMMENTS):
                continue
            if name in UNREAD:
                self.notices.append(f'"{name}" has no effect, as in DeepSpeed: it is one name, and no key in a block')
            elif name not in known.keys:
                if known.free and nearest(str(name), known.keys, LIKENESS_ELSEWHERE) is None:
                    put(self.values, here, copy.deepcopy(value))
                else:
                    self._unknown(known, name, value, here, where)
            elif value is not None:
                entry = known.keys[name]
                if name == "params" and isinstance(known, TypedBlock):
                    entry = known.params_of(data.get("type"))
                self._entry(entry, value, here, where)

    def _entry(self, entry: Entry, value: Any, path: str, written: str) -> None:
        if isinstance(entry, Alias):
            self._alias(entry, value, written)
        elif isinstance(entry, Key):
            self._value(entry, value, path, written)
        else:
            self._object(entry, value, path, written)

    def _object(self, known: Block, value: Any, path: str, written: str) -> None:
        if path == "zero_optimization" and isinstance(value, bool):
            self.notices.append(f'{written} = {show(value)} is the old form of {{"stage": {int(value)}}}')
            value = {"stage": int(value)}
        if not isinstance(value, Mapping):
            example = next(iter(known.keys), "enabled")
            self.problems.add(
                written, value, "expected a block between braces", f'Write it as {{"{example}": ...}}, or remove it.'
            )
        elif self._first(path, written, value):
            if look_up(self.values, path) is None:  # another name may have put a value inside already
                put(self.values, path, {})
            self.block(known, value, path, written)

    def _alias(self, alias: Alias, value: Any, written: str) -> None:
        target = find(root(), alias.target)
        if target is None:
            raise AssertionError(f"the alias {written} leads nowhere: {alias.target}")
        if alias.convert is not None:
            try:
                value = alias.convert[Flag().check(value)]
            except BadValue as error:
                self.problems.add(written, value, f"expected {error}", f"Correct it, or write {alias.target} instead.")
                return
            if value is None:
                return
        if alias.off is not None and not isinstance(value, bool) and value in (alias.off, str(alias.off)):
            return
        self.notices.append(f"{written} is another name of {alias.target}")
        self._entry(target, value, alias.target, written)

    def _value(self, entry: Key, value: Any, path: str, written: str) -> None:
        if not self._first(path, written, value):
            return
        if entry.auto and isinstance(value, str) and value.lower() == AUTO:
            put(self.values, path, AUTO)
            return
        try:
            put(self.values, path, entry.check(value))
        except BadValue as error:
            self.problems.add(written, value, f"expected {error}", _remedy(entry, value))

    def _first(self, path: str, written: str, value: Any) -> bool:
        """Whether the key was not given before under another name; else that is the problem."""
        before = self._given.setdefault(path, written)
        if before == written:
            return True
        self.problems.add(written, value, f"it is the same key as {before}, which is given too", "Remove one of them.")
        return False

    def _unknown(self, known: Block, name: Any, value: Any, path: str, written: str) -> None:
        if not isinstance(name, str):
            self.problems.add(written, value, "expected keys that are texts", "Write the key as a text.")
            return
        wrong, remedy, near = advice(known, name, path)
        self.problems.add(written, value, wrong, remedy)
        inner = known.keys.get(near) if near is not None else None
        if isinstance(inner, Block) and isinstance(value, Mapping):
            # Mistakes inside a misspelt block are reported now, not after the block's name has been mended.
            nested = _Checker(self.problems.source, {})
            nested.problems = self.problems
            nested.block(inner, value, f"{path.rpartition('.')[0]}.{near}".lstrip("."), written)


def _remedy(entry: Key, value: Any) -> str:
    """Say what to write instead of a value that does not fit."""
    if isinstance(entry, Choice) and isinstance(value, str):
        near = nearest(value, entry.choices)
        if near is not None:
            remove = f", or remove the key{_default(entry)}" if entry.default is not None else ""
            return f'The nearest known value is "{near}": write that{remove}.'
    if isinstance(entry, Flag) and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"Write {value.lower()} without quotes."
    if type(entry) in (Count, Real) and isinstance(value, str) and _WITH_UNIT.fullmatch(value):
        return f"Write the number without a unit, or remove the key{_default(entry)}."
    return f"Correct the value, or remove the key{_default(entry)}."


def _default(entry: Key) -> str:
    return "" if entry.default is None else f" for the default, {show(entry.default)}"
