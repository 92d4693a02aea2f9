"""The learning-rate schedules that a `scheduler` block may name: the keys of each, and what contradicts what in them.

Plain data beside the classes in `schedules/`, without torch, so that a configuration is checked without it. The same
rules hold for a schedule that a script makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hf_zero.config.schema import (
    BadValue,
    Choice,
    Count,
    Flag,
    Key,
    Real,
    Reals,
    When,
    either,
)
from hf_zero.config.typed_block import Fault, Type, TypedBlock, type_keys

PARAMS = "scheduler.params"
# DeepSpeed takes this where nothing is given, and a rule below needs to know.
DEFAULT_WARMUP_STEPS = 1000

_DECAYS = When(lambda get: bool(get(f"{PARAMS}.decay_step_size")), "decay_step_size is 0, so nothing decays")
_CYCLES_BETAS = When(lambda get: get(f"{PARAMS}.cycle_momentum") is not False, "cycle_momentum is off")

_WARMUP = {
    "warmup_num_steps": Count(auto=True, help="The number of optimizer steps of the warm-up."),
    "warmup_type": Choice(
        choices=("log", "linear"), help="The growth of the rate in the warm-up: logarithmic or linear."
    ),
}
_RATES = {
    "warmup_min_lr": Reals(auto=True, help="The rate before the warm-up, one number or one per param group."),
    "warmup_max_lr": Reals(auto=True, help="The rate after the warm-up, one number or one per param group."),
}
_NEEDS_TOTAL = {"total_num_steps": 'Write the number of optimizer steps, or "auto" under Trainer.'}
_TOTAL = {"total_num_steps": Count(low=1, auto=True, help="The number of optimizer steps of the whole schedule.")}

# Module and name of the class.
SCHEDULES: dict[str, Type] = {
    "hf_zero.optim.schedules.warmup.WarmupLR": Type(params={**_RATES, **_WARMUP}),
    "hf_zero.optim.schedules.warmup.WarmupDecayLR": Type(
        params={**_RATES, **_WARMUP, **_TOTAL}, required=_NEEDS_TOTAL
    ),
    "hf_zero.optim.schedules.warmup.WarmupCosineLR": Type(
        params={
            "warmup_min_ratio": Real(high=1, help="The part of the optimizer's rate that the warm-up starts with."),
            "cos_min_ratio": Real(high=1, help="The part of the optimizer's rate that the cosine ends with."),
            **_WARMUP,
            **_TOTAL,
        },
        required=_NEEDS_TOTAL,
    ),
    "hf_zero.optim.schedules.one_cycle.OneCycle": Type(
        params={
            "cycle_min_lr": Reals(help="The rate that the cycle starts and ends with."),
            "cycle_max_lr": Reals(help="The highest rate of the cycle."),
            "decay_lr_rate": Real(
                when=(_DECAYS,), help="The decay of the rate per decay_step_size steps after the cycle."
            ),
            "cycle_first_step_size": Count(low=1, help="The number of steps of the first half of the cycle."),
            "cycle_second_step_size": Count(
                help="The number of steps of the second half of the cycle; by default that of the first."
            ),
            "cycle_first_stair_count": Count(
                help="The number of stairs of the first half of the cycle; 0 is a straight line."
            ),
            "cycle_second_stair_count": Count(
                help="The number of stairs of the second half of the cycle; by default that of the first."
            ),
            "decay_step_size": Count(help="The number of steps of one decay after the cycle; 0 is no decay."),
            "cycle_momentum": Flag(None, help="Let Adam's first beta go the other way than the rate."),
            "cycle_min_mom": Reals(below=1, when=(_CYCLES_BETAS,), help="The lowest first beta of the cycle."),
            "cycle_max_mom": Reals(below=1, when=(_CYCLES_BETAS,), help="The highest first beta of the cycle."),
            "decay_mom_rate": Real(
                when=(_CYCLES_BETAS, _DECAYS),
                help="The growth of the first beta per decay_step_size steps after the cycle.",
            ),
        },
        required={
            "cycle_min_lr": "Write the rate that the cycle starts and ends with.",
            "cycle_max_lr": "Write the highest rate of the cycle.",
        },
    ),
    "hf_zero.optim.schedules.lr_range_test.LRRangeTest": Type(
        params={
            "lr_range_test_min_lr": Reals(help="The rate of the first step."),
            "lr_range_test_step_size": Count(low=1, help="The number of steps of one interval."),
            "lr_range_test_step_rate": Real(help="The part of the first rate that is added per interval."),
            "lr_range_test_staircase": Flag(None, help="Raise the rate at the end of an interval only."),
        }
    ),
}
TYPES = {path.rpartition(".")[2]: one for path, one in SCHEDULES.items()}


def faults(kind: str, params: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the mistakes in parameters that fit their keys: what is missing, and what contradicts something else."""
    for name, remedy in TYPES[kind].required.items():
        if params.get(name) is None:
            entry = _plain(TYPES[kind], name)
            yield Fault(name, None, f"{kind} cannot do without it: expected {entry.expected()}", remedy)
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
    """Yield names that the type does not have, and values that do not fit their keys; for parameters from Python."""
    for name, value in params.items():
        if name not in TYPES[kind].params:
            known = either(sorted(TYPES[kind].params))
            yield Fault(name, value, f"{kind} has no such parameter: expected {known}", "Remove it.")
            continue
        try:
            _plain(TYPES[kind], name).check(value)
        except BadValue as error:
            yield Fault(name, value, f"expected {error}", "Correct the value, or leave it out for the default.")


def _plain(kind: Type, name: str) -> Key:
    """A parameter's key in Python, where there is no "auto"."""
    entry = kind.params[name]
    assert isinstance(entry, Key)
    return replace(entry, auto=False)


BLOCKS = {
    "scheduler": TypedBlock(
        keys=type_keys(TYPES, help="The class of the learning-rate schedule."),
        types=TYPES,
        missing=f'Write "type" in it ({either(list(TYPES))}), or remove the block.',
        faults=faults,
    )
}
