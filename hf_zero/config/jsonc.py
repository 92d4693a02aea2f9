"""JSON as people write it in configuration files: comments and trailing commas are read over, the rest is strict.

`//`, `#` and `/* */` start comments outside strings. Duplicate keys are kept as findings instead of letting the last
one win. Every value's line is recorded under its dotted path, and an error says line, column and the key it stands at.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

_BLANK = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
# The text where a value should be, up to the next mark of JSON; messages show it.
_WORD = re.compile(r"[^\s,:{}\[\]\"#/]+|\S")
_DECODER = json.JSONDecoder()
# Python's json module, and so accelerate, writes float("inf") as Infinity.
_LITERALS = {"true": True, "false": False, "null": None, "Infinity": math.inf, "-Infinity": -math.inf}
# A Python dict that was copied into a file.
_PYTHON = {"True": "JSON writes true", "False": "JSON writes false", "None": "JSON writes null"}


class JsonError(ValueError):
    """The text is not JSON. `str()` says what was expected, at which line and column, and beside which key."""

    def __init__(self, message: str, line: int, column: int, path: str) -> None:
        at = f", at the key {path}" if path else ""
        super().__init__(f"line {line}, column {column}{at}: {message}")
        self.line = line
        self.path = path


@dataclass
class Document:
    """The JSON that was read: the value, the line of each key, and the keys that stand twice in one object."""

    value: Any
    lines: dict[str, int] = field(default_factory=dict)  # dotted path -> line of the key
    duplicates: list[tuple[str, int]] = field(default_factory=list)  # (dotted path, line of the second)


def loads(text: str) -> Document:
    """Read one JSON document.

    Raises:
        JsonError: The text is not JSON even with comments and trailing commas allowed.
    """
    reader = _Reader(text)
    document = reader.document
    document.value = reader.value("", reader.blank(0))
    end = reader.blank(reader.at)
    if end != len(text):
        reader.fail(f"expected the end of the text, found {reader.word(end)}", end, "")
    return document


def skip_blank(text: str, offset: int = 0) -> int:
    """The offset of the next character that is neither white space nor comment."""
    match = _BLANK.match(text, offset)
    return match.end() if match else offset


class _Reader:
    """Recursive descent over the text; `at` is the offset behind what was read last."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.document = Document(None)

    def fail(self, message: str, offset: int, path: str) -> NoReturn:
        line = self.line(offset)
        column = offset - self.text.rfind("\n", 0, offset)
        raise JsonError(message, line, column, path)

    def line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    def blank(self, offset: int) -> int:
        return skip_blank(self.text, offset)

    def word(self, offset: int) -> str:
        match = _WORD.match(self.text, offset)
        return repr(match.group()) if match else "the end of the text"

    def value(self, path: str, start: int) -> Any:
        """Read the value that starts at `start`."""
        mark = self.text[start : start + 1]
        if mark == "{":
            return self._object(path, start + 1)
        if mark == "[":
            return self._array(path, start + 1)
        if mark == '"':
            return self._string(path, start)
        number = _NUMBER.match(self.text, start)
        word = _WORD.match(self.text, start)
        if number and word and number.end() == word.end():
            self.at = number.end()
            try:
                return json.loads(number.group())
            except ValueError:  # more digits than Python converts
                self.fail("the number is too long", start, path)
        if word and word.group() in _LITERALS:
            self.at = word.end()
            return _LITERALS[word.group()]
        hint = _PYTHON.get(word.group() if word else "", "texts stand in double quotes")
        self.fail(f"expected a value, found {self.word(start)} ({hint})", start, path)

    def _string(self, path: str, start: int) -> str:
        try:
            text, self.at = _DECODER.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self.fail(re.sub(r"( starting)? at$", "", error.msg), error.pos, path)
        return str(text)

    def _object(self, path: str, start: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        last = path
        at = self.blank(start)
        while self.text[at : at + 1] != "}":
            if self.text[at : at + 1] != '"':
                self.fail(f"expected a key in double quotes or '}}', found {self.word(at)}", at, last)
            line = self.line(at)
            key = self._string(path, at)
            last = f"{path}.{key}" if path else key
            colon = self.blank(self.at)
            if self.text[colon : colon + 1] != ":":
                self.fail(f"expected ':' after the key, found {self.word(colon)}", self.at, last)
            if key in result:
                self.document.duplicates.append((last, line))
            self.document.lines.setdefault(last, line)
            result[key] = self.value(last, self.blank(colon + 1))
            at = self._separator("}", last)
        self.at = at + 1
        return result

    def _array(self, path: str, start: int) -> list[Any]:
        result: list[Any] = []
        at = self.blank(start)
        while self.text[at : at + 1] != "]":
            result.append(self.value(path, at))
            at = self._separator("]", path)
        self.at = at + 1
        return result

    def _separator(self, close: str, path: str) -> int:
        """Step over a comma, which may be a trailing one; return the offset of what comes next."""
        after = self.at
        at = self.blank(after)
        mark = self.text[at : at + 1]
        if mark == ",":
            return self.blank(at + 1)
        if mark != close:
            # The comma is missing behind the value, which may be lines before the mark that shows it.
            self.fail(f"expected ',' or '{close}' after the value, found {self.word(at)}", after, path)
        return at
