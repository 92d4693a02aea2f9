"""Mistakes in a configuration: one `Problem` each, collected, and raised together as one ConfigError.

Owns the wording common to all problems, and the search for the known key that was probably meant by an unknown one, at
the same depth or elsewhere. It does not decide what is wrong.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_zero.config.keys import root
from hf_zero.config.schema import Alias, Block, either, show
from hf_zero.errors import ConfigError

# Below this likeness (difflib ratio) a suggestion is more likely to mislead than to help.
LIKENESS = 0.6
# A key of another block is suggested only when it is much nearer than chance: there are 400 of them.
LIKENESS_ELSEWHERE = 0.8
# So near that a key of the same name in another block is not what was meant.
LIKENESS_SURE = 0.7
# The first letters that two names must share where nothing else is alike: nvme_dir and nvme_path.
SAME_START = 4

# Names from elsewhere, and the key that means the same here.
FOREIGN: dict[str, str] = {
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "mixed_precision": "bf16.enabled",
    "monitor_config": "the block of each monitor (tensorboard, ...)",
    "comms_config": "comms_logger",
    "offload": "zero_optimization.offload_optimizer or zero_optimization.offload_param",
    "cuda_visible_devices": "the environment variable CUDA_VISIBLE_DEVICES",
}

# A name that stands in more blocks than this (`enabled`) gives no hint of the block that was meant.
_FEW = 3
# Blocks around training, whose keys are not what is meant elsewhere.
_ASIDE = ("amp", "torch_autocast", "timers")
# More keys than this are not listed.
_MANY = 12


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


# ---------------------------------------------------------------- what was meant
class Advice(NamedTuple):
    wrong: str
    remedy: str
    near: str | None  # the nearest key at the same depth, when that is the advice


def advice(known: Block, name: str, path: str) -> Advice:
    """The advice for the unknown key `name`, written at the dotted `path` in the block `known`."""
    block = path.rpartition(".")[0]
    foreign = FOREIGN.get(name.lower())
    if foreign is not None:
        return Advice(f"unknown key; here it is {foreign}", f"Use {foreign} instead, or remove it.", None)
    canonical = [key for key, entry in known.keys.items() if not isinstance(entry, Alias)]
    near = nearest(name, canonical, LIKENESS_SURE)
    if near is None:
        far = nearest(name, (other.rpartition(".")[2] for other in _paths()), LIKENESS_ELSEWHERE)
        homes = _homes(far) if far is not None else ()
        if 0 < len(homes) <= _FEW:
            wrong = (
                "unknown key at this depth; it is known as" if far == name else "unknown key; the nearest known key is"
            )
            return Advice(f"{wrong} {either(homes)}", _move(homes, block), None)
        near = nearest(name, canonical)
    if near is None:  # only another name of a key is like it
        alias = nearest(name, known.keys)
        entry = known.keys[alias] if alias is not None else None
        near = entry.target.rpartition(".")[2] if isinstance(entry, Alias) else None
    if near is not None:
        full = f"{block}.{near}" if block else near
        return Advice(f'unknown key; the nearest known key is "{near}"', f"Rename it to {full}, or remove it.", near)
    listed = f" Known in {block}: {', '.join(sorted(canonical))}." if block and len(canonical) <= _MANY else ""
    return Advice("unknown key, and no known key is like it", f"Remove it.{listed}", None)


def _paths(block: Block | None = None, prefix: str = "") -> Iterator[str]:
    """The keys that may have been meant elsewhere: not those inside blocks of other tools."""
    for name, entry in (block or root()).keys.items():
        if not isinstance(entry, Alias):
            yield f"{prefix}{name}"
        if isinstance(entry, Block) and not entry.free and name not in _ASIDE:
            yield from _paths(entry, f"{prefix}{name}.")


def _homes(name: str) -> tuple[str, ...]:
    """The dotted paths of the keys of this name, whatever the block."""
    return tuple(path for path in _paths() if path.rpartition(".")[2].lower() == name.lower())


def _move(homes: tuple[str, ...], block: str) -> str:
    top = [home for home in homes if "." not in home]
    if top and block:
        return f"Move it to the top of the configuration, outside {block.partition('.')[0]}, or remove it."
    return f"Write it as {either(homes)}, or remove it."
