"""The answer of `hf-zero estimate`: plans of every stage and choice of offload, as a table or as JSON."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.estimate import Plan, Profile, measure, plan_model
from hf_zero.extras.cli import step_times
from hf_zero.extras.cli.memory_chart import draw
from hf_zero.extras.cli.meta_model import can_checkpoint, checkpointed, make_batch
from hf_zero.extras.cli.text import format_bytes, plural, table
from hf_zero.extras.estimate.choices import Advice, Choice, Hardware, advise, all_choices, as_json, plan_all, resolve
from hf_zero.extras.estimate.saved_inputs_plan import SavedInputsPlan
from hf_zero.extras.estimate.step_time import Speeds
from hf_zero.progress import progress


@dataclass(frozen=True)
class Answer:
    """The plans of every choice that the configuration allows, and the one to take."""

    plans: Mapping[Choice, Plan]
    advice: Advice | None  # None: no hardware was named
    batch_size: int
    profile: Profile | None
    without: str  # why activations are not counted
    times: list[step_times.Timed] | None  # without offload, and the advised one's; None where no speeds were named


@dataclass(frozen=True)
class Task:
    """A model, its configuration and the hardware it is to be trained on."""

    model: nn.Module
    raw: Mapping[str, Any]
    hardware: Hardware
    length: int
    _profiles: dict[tuple[int, bool], tuple[Profile | None, str]] = field(default_factory=dict)

    def answer(self, batch_size: int | None, speeds: Speeds | None = None) -> Answer:
        config = self._any_config(batch_size)
        batch_size = config.train_micro_batch_size_per_gpu
        profile, without = self._profile(batch_size, checkpoints=False)
        with progress("Planning", len([*all_choices()]), unit="choices") as done:
            plans = plan_all(self.raw, self.model, self.hardware, profile, done)
        known = self.hardware.cpu_memory if self.hardware.on_host else self.hardware.gpu_memory
        if known is None:
            return Answer(plans, None, batch_size, profile, without, self._times(plans, batch_size, speeds, None))
        with progress("Trying micro-batches", None, unit="plans") as done:

            def again(choice: Choice, checkpoints: bool, size: int) -> Plan | None:
                done(1)
                return self._plan_with(choice, size, checkpoints=checkpoints)

            advice = advise(
                plans,
                self.hardware,
                again if profile is not None else None,
                batch_size,
                format_bytes,
                can_checkpoint=can_checkpoint(self.model),
            )
        timed = self._times(plans, batch_size, speeds, advice)
        return Answer(plans, advice, batch_size, profile, without, timed)

    def _times(
        self, plans: Mapping[Choice, Plan], batch_size: int, speeds: Speeds | None, advice: Advice | None
    ) -> list[step_times.Timed] | None:
        """Return the times of the choices without offload, and of the one that is advised."""
        profile, _ = self._profile(batch_size, checkpoints=False)
        if speeds is None or profile is None:
            return None if speeds is None else []
        ask = functools.partial(step_times.times, self.raw, self.model, self.hardware, speeds)
        found = ask({choice: plan for choice, plan in plans.items() if not choice.offloaded}, profile)
        choice, checkpoints = (None, False) if advice is None else (advice.choice, advice.gradient_checkpointing)
        if choice is not None and (choice.offloaded or checkpoints):
            plan = self._plan_with(choice, batch_size, checkpoints=checkpoints)
            profile, _ = self._profile(batch_size, checkpoints=checkpoints)
            assert plan is not None and profile is not None  # it is advised
            found += ask({choice: plan}, profile, checkpoints=checkpoints)
        return found

    def _any_config(self, batch_size: int | None) -> Any:
        """Resolve the first choice that the configuration allows: all choices have the same types and batch."""
        *others, last = all_choices()
        for choice in others:
            with contextlib.suppress(ConfigError):
                return resolve(self.raw, choice, self.model, self.hardware, batch_size)
        return resolve(self.raw, last, self.model, self.hardware, batch_size)

    def _profile(self, batch_size: int, *, checkpoints: bool) -> tuple[Profile | None, str]:
        """Return the activations, or why they are not known. `checkpoints`: as if checkpointing had been asked for."""
        key = (batch_size, checkpoints)
        if key not in self._profiles:
            try:
                batch = make_batch(self.model, batch_size, self.length)
                config = self._any_config(batch_size)
                with checkpointed(self.model) if checkpoints else contextlib.nullcontext():
                    self._profiles[key] = measure(self.model, config, batch, on_host=self.hardware.on_host), ""
            except Exception as error:  # any model's code runs here, on sizes without values
                self._profiles[key] = None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return self._profiles[key]

    def _plan_with(self, choice: Choice, batch_size: int, *, checkpoints: bool) -> Plan | None:
        config = resolve(self.raw, choice, self.model, self.hardware, batch_size)
        profile, _ = self._profile(batch_size, checkpoints=checkpoints)
        if profile is None:
            return None
        hardware = self.hardware
        return plan_model(self.model, config, on_host=hardware.on_host, per_host=hardware.gpus, profile=profile)

    @property
    def parameters(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    def as_json(self, answer: Answer) -> dict[str, Any]:
        advice, profile = answer.advice, answer.profile
        return {
            "model": type(self.model).__name__,
            "parameters": self.parameters,
            "world_size": self.hardware.world_size,
            "batch_size": answer.batch_size,
            "sequence_length": self.length,
            "activations": None if profile is None else {"saved_bytes": profile.saved, "peak_bytes": profile.peak},
            "saved_inputs": None if profile is None or profile.inputs is None else vars(profile.inputs),
            "activations_not_counted": answer.without or None,
            "times": step_times.as_json(answer.times or [], self.hardware),
            "choices": [as_json(choice, plan, self.hardware) for choice, plan in answer.plans.items()],
            "recommended": advice
            and {
                "choice": advice.choice and vars(advice.choice),
                "gradient_checkpointing": advice.gradient_checkpointing,
                "micro_batch_size": advice.batch_size,
                "reason": advice.reason,
            },
        }

    def show(self, answer: Answer) -> None:
        hardware = self.hardware
        ranks = plural(hardware.gpus, "CPU rank" if hardware.on_host else "GPU rank")
        print(
            f"{type(self.model).__name__}, {self.parameters / 1e6:,.0f} M parameters; "
            f"{plural(hardware.nodes, 'node')} with {ranks} each; "
            f"micro-batch {answer.batch_size} x {self.length} per rank"
        )
        if answer.profile is None:
            print(f"activations are NOT counted: this model does not run on sizes alone ({answer.without})")
            if answer.times is not None:
                print("the time of a step is NOT planned, for the same reason")
            if "activation_checkpointing" in self.raw:
                print("activation_checkpointing: what it places elsewhere is NOT counted either")
        else:
            saved, peak = format_bytes(answer.profile.saved), format_bytes(answer.profile.peak)
            print(f"activations, by a forward and backward on meta tensors: {saved} between them, {peak} at the peak")
            for line in _of_saved_inputs(answer.profile.inputs):
                print(line)
        print()
        for line in _table(answer.plans, hardware):
            print(line)
        if limits := hardware.needs(next(iter(answer.plans.values()))):
            print("can be used: " + ", ".join(f"{format_bytes(one.usable)} of the {one.what}" for one in limits))
        print()
        if answer.times:
            accumulation = self._any_config(answer.batch_size).gradient_accumulation_steps
            for line in step_times.lines(answer.times, hardware, answer.batch_size * self.length * accumulation):
                print(line)
            print()
        if answer.advice is None:
            print("Name the hardware (--gpu-memory, --cpu-memory) to get a recommendation.")
            return
        print(_sentence(answer.advice))

    def draw(self, answer: Answer, path: Path) -> None:
        """Write a picture of the device memory of every choice to `path`."""
        hardware, profile = self.hardware, answer.profile
        facts = [
            f"{type(self.model).__name__}, {self.parameters / 1e9:.1f} B parameters",
            f"{hardware.world_size} {'CPU' if hardware.on_host else 'GPU'} rank(s)",
            f"micro-batch {answer.batch_size} x {self.length}",
            *(["activations are not counted"] if profile is None else []),
        ]
        draw(answer.plans, ", ".join(facts), hardware, path)


def _of_saved_inputs(inputs: SavedInputsPlan | None) -> Iterator[str]:
    if inputs is None:
        return
    yield from inputs.notes
    if inputs.host:
        yield f"saved inputs of {inputs.num_regions} checkpointed regions: {format_bytes(inputs.host)} on host"


_COLUMNS = ("params", "master", "states", "grads", "gathered", "buffers", "activ.")
_GROUPS = (
    ("parameters", "buffers of the model", "staged parameters"),
    ("master",),
    ("optimizer", "update"),
    ("gradients", "whole gradients"),
    ("gathered parameters",),
    ("gradient buffers", "staging", "saved inputs", "lost to the allocator"),
    ("activations",),
)


def _table(plans: Mapping[Choice, Plan], hardware: Hardware) -> list[str]:
    """Lay out totals of what has a limit, a device or a node, and the kinds of a rank's bytes in memory."""
    memory = ["memory/rank", "memory/node"] if hardware.on_host else ["GPU", "host/node"]
    rows = [["stage", "optimizer", "params on", *memory, "disk/node", *(f"rank: {_COLUMNS[0]}", *_COLUMNS[1:]), ""]]
    for choice, plan in plans.items():
        everywhere = [plan.device, plan.host]
        kinds = [sum(one.get(kind, 0) for one in everywhere for kind in group) for group in _GROUPS]
        of_rank, of_node = (
            (plan.memory_peak, plan.memory_peak) if hardware.on_host else (plan.device_peak, plan.host_peak)
        )
        totals = [of_rank, of_node * hardware.gpus, sum(plan.disk.values()) * hardware.gpus]
        short = hardware.misfit(plan)
        fits = f"too large: {memory[not short.of_device or hardware.on_host]}" if short is not None else ""
        sizes = [format_bytes(value) if value else "-" for value in (*totals, *kinds)]
        rows.append([str(choice.stage), choice.optimizer, choice.param, *sizes, fits])
    lines = table(rows, left=0)
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _sentence(advice: Advice) -> str:
    if advice.choice is None:
        return f"No choice fits: {advice.reason.removeprefix('nothing fits: ')}."
    more = ", with gradient checkpointing" if advice.gradient_checkpointing else ""
    batch = f", micro-batch {advice.batch_size}" if advice.batch_size is not None else ""
    return f"Take {advice.choice}{more}{batch}: {advice.reason}."
