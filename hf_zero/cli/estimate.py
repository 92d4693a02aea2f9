"""`hf-zero estimate`: what every stage and choice of offload needs for a model, and which one to take."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.checkpoint.consolidate import parse_bytes, progress_bar
from hf_zero.cli.text import count, format_bytes, table
from hf_zero.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from hf_zero.estimate import Plan, Profile
    from hf_zero.estimate.choices import Advice, Choice, Hardware

NAME = "estimate"
SUMMARY = "plan the memory of every stage and offload choice for a model, and name the one to take"
EXAMPLES = """
hf-zero estimate path/to/model --gpus 8 --gpu-memory 80GB --cpu-memory 512GB
hf-zero estimate config.json --gpus 2 --gpu-memory 24GB --config zero3.json --batch-size 4
hf-zero estimate path/to/model --gpus 8 --nodes 4 --sequence-length 4096 --gradient-checkpointing --json
"""


def size(text: str) -> int:
    """As `parse_bytes`, with a unit: 80 alone would be 80 bytes."""
    if text.strip()[-1:].isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GB, 512MB or 24GiB")
    return parse_bytes(text)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a model folder, or a config.json; weights are not needed")
    add("--gpus", type=count, default=1, metavar="N", help="GPUs (ranks) of a node (default: 1)")
    add("--nodes", type=count, default=1, metavar="M", help="nodes (default: 1)")
    add("--gpu-memory", type=size, metavar="SIZE", help="memory of a GPU (default: of this machine's, if it has one)")
    add("--cpu-memory", type=size, metavar="SIZE", help="host memory of a node (default: not limited)")
    add("--config", type=Path, metavar="FILE", help="ZeRO configuration for all other keys (default: bf16, AdamW)")
    add("--batch-size", type=count, metavar="B", help="micro-batch of a rank (default: the configuration's, else 1)")
    add("--sequence-length", type=count, metavar="S", help="tokens of a sequence (default: the model's, at most 1024)")
    add("--gradient-checkpointing", action="store_true", help="with activation checkpointing")
    add("--on-cpu", action="store_true", help="ranks compute on the CPU, over gloo")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    with _without_collections():
        _run(args)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Plans make a million small objects without cycles, and every collection would look through all modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run(args: argparse.Namespace) -> None:
    from hf_zero.cli import meta_model
    from hf_zero.config import ZeroConfig

    try:
        model_config = meta_model.read_config(args.model)
        raw = ZeroConfig.load(args.config).values if args.config is not None else {"bf16": {"enabled": True}}
    except ConfigError as error:
        raise argparse.ArgumentError(None, "; ".join(str(error).splitlines())) from error
    model = meta_model.build(model_config, gradient_checkpointing=args.gradient_checkpointing)
    task = _Task(model, raw, _hardware(args), args.sequence_length or meta_model.default_length(model_config))
    answer = task.answer(args.batch_size)
    if args.json:
        print(json.dumps(task.as_json(answer)))
    else:
        task.show(answer)


def _hardware(args: argparse.Namespace) -> Hardware:
    import torch

    from hf_zero.estimate.choices import Hardware

    memory = args.gpu_memory
    if memory is None and not args.on_cpu and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    return Hardware(args.gpus, args.nodes, memory, args.cpu_memory, args.on_cpu)


@dataclass(frozen=True)
class _Answer:
    plans: Mapping[Choice, Plan]
    advice: Advice | None  # None: no hardware was named
    batch_size: int
    profile: Profile | None
    without: str  # why activations are not counted


@dataclass(frozen=True)
class _Task:
    model: nn.Module
    raw: Mapping[str, Any]
    hardware: Hardware
    length: int

    def answer(self, batch_size: int | None) -> _Answer:
        from hf_zero.estimate.choices import advise, plan_all

        config = self._any_config(batch_size)
        batch_size = config.train_micro_batch_size_per_gpu
        profile, without = self._profile(batch_size)
        plans = plan_all(self.raw, self.model, self.hardware, profile)
        known = self.hardware.cpu_memory if self.hardware.on_host else self.hardware.gpu_memory
        if known is None:
            return _Answer(plans, None, batch_size, profile, without)
        again: Callable[[Choice, int], Plan] | None = self._plan_with if profile is not None else None
        advice = advise(plans, self.hardware, again, batch_size, format_bytes)
        return _Answer(plans, advice, batch_size, profile, without)

    def _any_config(self, batch_size: int | None) -> Any:
        """Of the first choice that the configuration allows: types and batch are those of all of them."""
        from hf_zero.estimate.choices import all_choices, resolve

        *others, last = all_choices()
        for choice in others:
            with contextlib.suppress(ConfigError):
                return resolve(self.raw, choice, self.model, self.hardware, batch_size)
        return resolve(self.raw, last, self.model, self.hardware, batch_size)

    def _profile(self, batch_size: int) -> tuple[Profile | None, str]:
        from hf_zero.cli.meta_model import make_batch
        from hf_zero.estimate import measure

        try:
            batch = make_batch(self.model, batch_size, self.length)
            config = self._any_config(batch_size)
            return measure(self.model, config, batch, on_host=self.hardware.on_host), ""
        except Exception as error:  # any model's code runs here, on sizes without values
            return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def _plan_with(self, choice: Choice, batch_size: int) -> Plan:
        from hf_zero.estimate import plan_model
        from hf_zero.estimate.choices import resolve

        draw = progress_bar("trying micro-batches")
        draw(batch_size, 2 * batch_size)
        config = resolve(self.raw, choice, self.model, self.hardware, batch_size)
        profile, _ = self._profile(batch_size)
        return plan_model(self.model, config, on_host=self.hardware.on_host, profile=profile)

    @property
    def parameters(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    def as_json(self, answer: _Answer) -> dict[str, Any]:
        from hf_zero.estimate.choices import as_json

        advice, profile = answer.advice, answer.profile
        return {
            "model": type(self.model).__name__,
            "parameters": self.parameters,
            "world_size": self.hardware.world_size,
            "batch_size": answer.batch_size,
            "sequence_length": self.length,
            "activations": None if profile is None else {"saved_bytes": profile.saved, "peak_bytes": profile.peak},
            "activations_not_counted": answer.without or None,
            "choices": [as_json(choice, plan, self.hardware) for choice, plan in answer.plans.items()],
            "recommended": advice
            and {
                "choice": advice.choice and vars(advice.choice),
                "micro_batch_size": advice.batch_size,
                "reason": advice.reason,
            },
        }

    def show(self, answer: _Answer) -> None:
        hardware = self.hardware
        device = "CPU" if hardware.on_host else "GPU"
        print(
            f"{type(self.model).__name__}, {self.parameters / 1e6:,.0f} M parameters; {hardware.nodes} node(s) with "
            f"{hardware.gpus} {device} rank(s) each; micro-batch {answer.batch_size} x {self.length} per rank"
        )
        if answer.profile is None:
            print(f"activations are NOT counted: this model does not run on sizes alone ({answer.without})")
        else:
            saved, peak = format_bytes(answer.profile.saved), format_bytes(answer.profile.peak)
            print(f"activations, by a forward and backward on meta tensors: {saved} between them, {peak} at the peak")
        print()
        for line in _table(answer.plans, hardware):
            print(line)
        print()
        if answer.advice is None:
            print("Name the hardware (--gpu-memory, --cpu-memory) to get a recommendation.")
            return
        print(_sentence(answer.advice))


_COLUMNS = ("params", "master", "states", "grads", "gathered", "buffers", "activ.")
_GROUPS = (
    ("parameters", "buffers of the model", "staged parameters"),
    ("master",),
    ("optimizer", "update"),
    ("gradients", "whole gradients"),
    ("gathered parameters",),
    ("gradient buffers", "staging", "lost to the allocator"),
    ("activations",),
)


def _table(plans: Mapping[Choice, Plan], hardware: Hardware) -> list[str]:
    head = ["stage", "optimizer", "params on", "rank: device", "host", "disk", *_COLUMNS, ""]
    rows = [head]
    for choice, plan in plans.items():
        everywhere = [plan.device, plan.host]
        kinds = [sum(one.get(kind, 0) for one in everywhere for kind in group) for group in _GROUPS]
        totals = [plan.device_peak, plan.host_peak, sum(plan.disk.values())]
        fits = "" if hardware.misfit(plan) is None else "too large"
        sizes = [format_bytes(value) if value else "-" for value in (*totals, *kinds)]
        rows.append([str(choice.stage), choice.optimizer, choice.param, *sizes, fits])
    lines = table(rows, left=0)
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _sentence(advice: Advice) -> str:
    if advice.choice is None:
        return f"No choice fits: {advice.reason.removeprefix('nothing fits: ')}."
    batch = f", micro-batch {advice.batch_size}" if advice.batch_size is not None else ""
    return f"Take {advice.choice}{batch}: {advice.reason}."
