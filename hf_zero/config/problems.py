"""Mistakes in a configuration: one `Problem` each, collected, and raised together as one ConfigError.

Owns the wording common to all problems and the search for the nearest known key. It does not decide what is wrong.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.errors import ConfigError

# Below this likeness (difflib ratio) a suggestion is more likely to mislead than to help.
LIKENESS = 0.6
# A key of another block is suggested only when it is much nearer than chance: there are 400 of them.
LIKENESS_ELSEWHERE = 0.8
# So near that a key of the same name in another block is not what was meant.
LIKENESS_SURE = 0.7
# Letters at the start that two names must share where nothing else is alike: nvme_dir and nvme_path.
SAME_START = 4


@dataclass(frozen=True)
class Problem:
    """One mistake: `text` says what is wrong with `key` and what was expected, `remedy` what to do."""

    key: str  # dotted path in the configuration
    text: str
    remedy: str
    line: int | None = None  # in the file or JSON string

    def __str__(self) -> str:
        return f"{self.text}\n   {self.remedy}"


class Problems:
    """Collects problems in the order they were found, which is the order of the message."""

    def __init__(self, source: str, lines: Mapping[str, int], found: Iterable[Problem] = ()) -> None:
        self.source = source
        self._lines = lines
        self.found: list[Problem] = list(found)

    def add(self, key: str, value: Any, wrong: str, remedy: str, shown: tuple[str, Any] | None = None) -> None:
        """`KEY = VALUE (line N): WRONG`, and the remedy on a line of its own.

        `shown` is the key and value to write there when they are not the problem's own.
        """
        path, given = shown if shown is not None else (key, value)
        line = self._lines.get(path, self._lines.get(key))
        where = f" (line {line})" if line is not None else ""
        self.found.append(Problem(key, f"{path} = {show(given)}{where}: {wrong}.", remedy, line))

    def add_text(self, key: str, text: str, remedy: str) -> None:
        """A problem with a text of its own, such as a difference to TrainingArguments."""
        self.found.append(Problem(key, text, remedy, self._lines.get(key)))

    def has(self, path: str) -> bool:
        """Whether something was found about a key, or about a block or what is inside it."""
        return any(problem.key == path or problem.key.startswith(f"{path}.") for problem in self.found)

    def without_details_of(self, blocks: Iterable[str]) -> list[Problem]:
        """The problems, less those inside `blocks`: what is refused as a whole needs no list of its faults."""
        prefixes = tuple(f"{block}." for block in blocks)
        return [problem for problem in self.found if not problem.key.startswith(prefixes)]


def raise_all(source: str, problems: Sequence[Problem]) -> None:
    """Raise one ConfigError that lists every problem; return if there are none."""
    if not problems:
        return
    noun = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    listed = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, start=1))
    raise ConfigError(f"{noun} in the ZeRO configuration ({source}):\n{listed}")


def show(value: Any, longest: int = 80) -> str:
    """A value as it stands in JSON, cut to a length that keeps the message readable."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def nearest(name: str, known: Iterable[str], cutoff: float = LIKENESS) -> str | None:
    """The known name most like `name`, whatever its case, or None if none is like it."""
    by_lower: dict[str, str] = {}
    for key in known:
        by_lower.setdefault(key.lower(), key)
    match = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    if not match and cutoff <= LIKENESS and len(name) >= SAME_START:
        alike = [key for key in by_lower if key.startswith(name.lower()[:SAME_START])]
        match = difflib.get_close_matches(name.lower(), alike, n=1, cutoff=0.0)
    return by_lower[match[0]] if match else None


def either(choices: Sequence[str]) -> str:
    """`a, b or c`."""
    if len(choices) < 2:
        return "".join(choices)
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
