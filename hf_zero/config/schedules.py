"""Mistakes in a scheduler's parameters taken together: what is missing, and what contradicts something else.

Types and ranges of single values are the rows of `optimizers.py`. The same rules hold for a `scheduler` block and for
the classes of `hf_zero.optim.schedules.deepspeed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hf_zero.config.optimizers import SCHEDULER_PARAMS, SCHEDULER_TYPES, SCHEDULERS
from hf_zero.config.problems import Problems, either, show
from hf_zero.config.schema import BadValue, Key

BLOCK = "scheduler"
PARAMS = f"{BLOCK}.params"
# What DeepSpeed takes where nothing is given, and a rule below needs to know.
DEFAULT_WARMUP_STEPS = 1000
_REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
_EXAMPLES = {
    "total_num_steps": 'Write the number of optimizer steps, or "auto" under Trainer.',
    "cycle_min_lr": "Write the rate that the cycle starts and ends with.",
    "cycle_max_lr": "Write the highest rate of the cycle.",
}


@dataclass(frozen=True)
class Fault:
    """One mistake in the parameter `name`."""

    name: str
    value: Any
    wrong: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} = {show(self.value)}: {self.wrong}.\n   {self.remedy}"


def faults(kind: str, params: Mapping[str, Any]) -> Iterator[Fault]:
    """What is missing or contradictory in parameters that fit their rows; "auto" stands for a number not known yet."""
    for name in _REQUIRED.get(kind, ()):
        if params.get(name) is None:
            yield Fault(name, None, f"{kind} cannot do without it: expected {_expected(name)}", _EXAMPLES[name])
    total = params.get("total_num_steps")
    warmup = params.get("warmup_num_steps")
    by_default = warmup is None
    if by_default:
        warmup = DEFAULT_WARMUP_STEPS
    if isinstance(total, int) and isinstance(warmup, int) and warmup > total:
        origin = ", which is the default where it is not given" if by_default else ""
        yield Fault(
            "warmup_num_steps",
            warmup,
            f"the warm-up is longer than the training (total_num_steps = {total}){origin}: expected at most {total}",
            "Write fewer steps of warm-up, or more steps in total.",
        )


def value_faults(kind: str, params: Mapping[str, Any]) -> Iterator[Fault]:
    """Names that the type does not have, and values that do not fit their rows. For parameters from Python."""
    for name, value in params.items():
        row = SCHEDULER_PARAMS.get(name)
        if name not in SCHEDULER_TYPES[kind] or not isinstance(row, Key):
            known = either(sorted(SCHEDULER_TYPES[kind]))
            yield Fault(name, value, f"{kind} has no such parameter: expected {known}", "Remove it.")
            continue
        try:
            dataclasses.replace(row, auto=False).check(value)
        except BadValue as error:
            yield Fault(name, value, f"expected {error}", "Correct the value, or leave it out for the default.")


def check_block(values: Mapping[str, Any], problems: Problems) -> None:
    """Add what is missing or contradictory in the `scheduler` block. "auto" may still stand in it."""
    block = values.get(BLOCK)
    if not isinstance(block, Mapping):
        return
    if "type" not in block:
        if not problems.has(BLOCK):
            remedy = f'Write "type" in it ({either(SCHEDULERS)}), or remove the block.'
            problems.add(BLOCK, dict(block), "the type is missing", remedy)
        return
    for fault in faults(block["type"], block.get("params", {})):
        if not problems.has(f"{PARAMS}.{fault.name}"):
            problems.add(f"{PARAMS}.{fault.name}", fault.value, fault.wrong, fault.remedy)


def _expected(name: str) -> str:
    row = SCHEDULER_PARAMS[name]
    return dataclasses.replace(row, auto=False).expected() if isinstance(row, Key) else ""
