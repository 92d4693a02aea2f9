"""The times of a step in the answer of `hf-zero estimate`: every stage, and shards in groups of a node's ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_zero.estimate import Plan, Profile, plan_model
from hf_zero.extras.cli.text import format_bytes, table
from hf_zero.extras.estimate.choices import Choice, Hardware, resolve
from hf_zero.extras.estimate.step_time import Speeds, StepTime, step_time


@dataclass(frozen=True)
class Timed:
    """A choice of stage and group, and the time of its step."""

    choice: Choice
    group: str | int  # zero_optimization.sharding_group
    plan: Plan
    time: StepTime
    checkpoints: bool  # with activation checkpointing that nobody asked for

    @property
    def name(self) -> str:
        more = ", gradient checkpointing" if self.checkpoints else ""
        in_groups = "" if self.group == "all" else f', "sharding_group": {json.dumps(self.group)}'
        return f"{str(self.choice).removesuffix(', no offload')}{more}{in_groups}"


def times(
    raw: Mapping[str, Any],
    model: nn.Module,
    hardware: Hardware,
    speeds: Speeds,
    choices: Mapping[Choice, Plan],
    profile: Profile,
    *,
    checkpoints: bool = False,
) -> list[Timed]:
    """Return these choices, and the same in groups of a node's ranks where the file names no group.

    Args:
        checkpoints: The profile has activation checkpointing that nobody asked for.
    """
    found = []
    per_host = hardware.gpus
    for choice, plan in choices.items():
        group = resolve(raw, choice, model, hardware).zero.sharding_group
        plans = {group: plan}
        if group == "all" and choice.stage and hardware.nodes > 1 and per_host > 1:
            zero = {**(raw.get("zero_optimization") or {}), "sharding_group": "host"}
            config = resolve({**raw, "zero_optimization": zero}, choice, model, hardware)
            plans["host"] = plan_model(model, config, on_host=hardware.on_host, per_host=per_host, profile=profile)
        for group, one in plans.items():
            time = step_time(one.passes, profile, speeds, per_host=per_host)
            found.append(Timed(choice, group, one, time, checkpoints))
    return found


def lines(timed: list[Timed], hardware: Hardware, tokens: int) -> Iterator[str]:
    """Yield a table, and the fastest that fits.

    Args:
        tokens: Of a step, on a rank.
    """
    memory = "memory/rank" if hardware.on_host else "GPU"
    rows = [["time of a step", memory, "computing", "waiting", "seconds", "tokens/s, rank", "from other nodes", ""]]
    for one in timed:
        peak = one.plan.memory_peak if hardware.on_host else one.plan.device_peak
        fits = "" if hardware.misfit(one.plan) is None else "too large"
        seconds = [f"{value:.3g}" for value in (one.time.computing, one.time.waiting, one.time.total)]
        across = format_bytes(one.time.across) if one.time.across else "-"
        rows.append([one.name, format_bytes(peak), *seconds, f"{tokens / one.time.total:,.0f}", across, fits])
    yield from table(rows)
    fitting = [one for one in timed if hardware.misfit(one.plan) is None]
    if not fitting:
        yield "None of these fits."
        return
    best = min(fitting, key=lambda one: (bool(one.choice.offloaded), one.time.total))
    more = ", and the copies and updates of what is offloaded, which are not planned" if best.choice.offloaded else ""
    yield f"Fastest: {best.name}, {best.time.total:.3g} s{more}."


def as_json(timed: list[Timed], hardware: Hardware) -> list[dict[str, Any]]:
    """Return a row for each, for programs."""
    return [
        {
            **dataclasses.asdict(one.choice),
            "sharding_group": one.group,
            "gradient_checkpointing": one.checkpoints,
            **dataclasses.asdict(one.time),
            "total": one.time.total,
            "fits": hardware.misfit(one.plan) is None,
        }
        for one in timed
    ]
