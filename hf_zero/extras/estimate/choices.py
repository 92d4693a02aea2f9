"""Every legal choice of stage and offload for a model and its ranks, planned, and which one to take."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_zero.config import ResolvedConfig, ZeroConfig
from hf_zero.config.media import MEDIA, Medium
from hf_zero.errors import ConfigError
from hf_zero.extras.estimate.plan import Plan, plan_model
from hf_zero.extras.estimate.profile import Profile
from hf_zero.progress import Done, ignore

_ORDER = list(MEDIA)
# A process needs this on a GPU beside its tensors: context, cuBLAS, and 0.3-0.5 GB for each of two NCCL communicators.
DEVICE_RESERVE = 2_000_000_000
DEVICE_SHARE = 0.95
HOST_SHARE = 0.9
MAX_BATCH = 1024
# Stands in plans for a folder that nobody has named: no file is made.
_NVME_PATH = "/local_nvme"


@dataclass(frozen=True)
class Choice:
    stage: int
    optimizer: str  # offload_optimizer.device
    param: str  # offload_param.device

    def __str__(self) -> str:
        names = {"optimizer": "optimizer states", "parameters": "parameters"}
        media = [f"{names[what]} on {'the host' if one.is_host else 'disk'}" for what, one in self.offloaded.items()]
        return f"stage {self.stage}, {' and '.join(media) or 'no offload'}"

    @property
    def offloaded(self) -> dict[str, Medium]:
        """The media that are not the device, by what is there."""
        media = {"optimizer": MEDIA[self.optimizer], "parameters": MEDIA[self.param]}
        return {what: medium for what, medium in media.items() if not medium.is_device}

    @property
    def needs_disk(self) -> bool:
        return any(medium.needs_folder for medium in self.offloaded.values())

    @property
    def cost(self) -> tuple[int, int, int]:
        """The order of proposals: what leaves the device moves more bytes than what is gathered from other ranks."""
        return (_ORDER.index(self.optimizer), _ORDER.index(self.param), self.stage)


@dataclass(frozen=True)
class Hardware:
    """Bytes; None where nothing is known."""

    gpus: int  # per node
    nodes: int
    gpu_memory: int | None
    cpu_memory: int | None  # per node
    on_host: bool = False  # ranks compute on the CPU

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    def needs(self, plan: Plan) -> list[Need]:
        """Return what `plan` needs of each memory whose size is known."""
        needs = []
        if self.gpu_memory is not None and not self.on_host:
            usable = int(self.gpu_memory * DEVICE_SHARE) - DEVICE_RESERVE
            needs.append(Need("memory of a GPU", plan.device_peak, max(usable, 0), 1, True))
        if self.cpu_memory is not None:
            what, each = ("memory", plan.memory_peak) if self.on_host else ("host memory", plan.host_peak)
            usable = int(self.cpu_memory * HOST_SHARE)
            needs.append(Need(f"{what} of a node", each * self.gpus, usable, self.gpus, self.on_host))
        return needs

    def misfit(self, plan: Plan) -> Need | None:
        """Return the memory that is too small for `plan`; None if it fits."""
        return next((need for need in self.needs(plan) if need.nbytes > need.usable), None)


@dataclass(frozen=True)
class Need:
    """Bytes of a kind of memory that `ranks` ranks share."""

    what: str
    nbytes: int
    usable: int
    ranks: int
    of_device: bool  # of the memory in which ranks compute


@dataclass(frozen=True)
class Advice:
    choice: Choice | None  # None: nothing fits
    batch_size: int | None  # largest power of two that fits; None where activations are not known
    reason: str
    gradient_checkpointing: bool = False  # it fits with that only, and nobody asked for it


# Plans a choice, with activation checkpointing or as was asked for, and a micro-batch; None where it cannot.
PlanOf = Callable[[Choice, bool, int], Plan | None]


def all_choices() -> Iterator[Choice]:
    on_device = [name for name, medium in MEDIA.items() if medium.is_device]
    for stage in range(4):
        for optimizer in MEDIA if stage else on_device:
            for param in MEDIA if stage == 3 else on_device:
                yield Choice(stage, optimizer, param)


def configure(raw: Mapping[str, Any], choice: Choice, batch_size: int | None) -> dict[str, Any]:
    """`raw` with the stage and media of `choice`, and without what only TrainingArguments could fill in.

    Learning rates and schedules take no memory; "auto" types mean bf16; "auto" batch numbers `batch_size`.
    """
    config = copy.deepcopy(dict(raw))
    zero = dict(config.get("zero_optimization") or {})
    zero["stage"] = choice.stage
    for name, device in (("offload_optimizer", choice.optimizer), ("offload_param", choice.param)):
        block = dict(zero.get(name) or {})
        zero[name] = {**block, "device": device, "nvme_path": block.get("nvme_path") or _NVME_PATH}
    config["zero_optimization"] = zero
    for name in ("scheduler", "train_batch_size"):
        config.pop(name, None)
    micro = config.get("train_micro_batch_size_per_gpu")
    if batch_size is not None or not isinstance(micro, int):
        config["train_micro_batch_size_per_gpu"] = batch_size or 1
    for name, value in (("gradient_accumulation_steps", 1), ("gradient_clipping", 1.0)):
        if config.get(name) == "auto":
            config[name] = value
    for name, value in (("bf16", True), ("fp16", False)):
        types = config.get(name)
        if isinstance(types, dict) and types.get("enabled") == "auto":
            config[name] = {**types, "enabled": value}
    optimizer = config.get("optimizer")
    if isinstance(optimizer, dict):
        params = {name: value for name, value in (optimizer.get("params") or {}).items() if value != "auto"}
        config["optimizer"] = {**optimizer, "params": {"lr": 1e-4, **params}}
    return config


def resolve(
    raw: Mapping[str, Any], choice: Choice, model: nn.Module, hardware: Hardware, batch_size: int | None = None
) -> ResolvedConfig:
    """Raises ConfigError for a choice that the configuration does not allow."""
    config = ZeroConfig.load(configure(raw, choice, batch_size))
    return config.resolve(model=model, world_size=hardware.world_size)


def plan_all(
    raw: Mapping[str, Any], model: nn.Module, hardware: Hardware, profile: Profile | None, done: Done = ignore
) -> dict[Choice, Plan]:
    """Return rank 0's plan for every choice that the configuration allows. `done` is told of each choice.

    Raises ConfigError where it allows none.
    """
    plans: dict[Choice, Plan] = {}
    refused: ConfigError | None = None
    for choice in all_choices():
        try:
            config = resolve(raw, choice, model, hardware)
            plans[choice] = plan_model(
                model, config, on_host=hardware.on_host, per_host=hardware.gpus, profile=profile
            )
        except ConfigError as error:
            refused = error
        done(1)
    if not plans and refused is not None:
        raise refused
    return plans


def advise(
    plans: Mapping[Choice, Plan],
    hardware: Hardware,
    plan_of: PlanOf | None,
    batch_size: int,
    show: Callable[[float], str],
    *,
    can_checkpoint: bool = False,
) -> Advice:
    """The first choice that fits, and the largest micro-batch with it.

    Args:
        plan_of: None where activations are not known.
        batch_size: That `plans` are for.
        show: Bytes, for people.
        can_checkpoint: Activation checkpointing is off, and may be proposed.
    """
    passed: list[str] = []
    for choice, checkpoints in _in_order(plans, hardware, can_checkpoint=can_checkpoint and plan_of is not None):
        plan: Plan | None = plans[choice]
        if checkpoints:
            assert plan_of is not None
            plan = (
                plan_of(choice, True, batch_size) if _may_fit_with_less_activations(plans[choice], hardware) else None
            )
        if plan is None:
            continue
        if (short := hardware.misfit(plan)) is not None:
            # Another one than the micro-batch that the answer names: it has been planned for the first one only.
            batch = f" at micro-batch {batch_size}" if plan_of is not None else ""
            what = f"{choice}{' and gradient checkpointing' if checkpoints else ''}"
            usable = f"{show(short.usable)} of the {short.what} can be used"
            passed.append(f"{what} would need {show(short.nbytes)}{batch}, and {usable}")
            continue
        largest = None
        if plan_of is not None:
            again = functools.partial(plan_of, choice, checkpoints)
            largest, plan = _largest_batch(again, hardware, batch_size, plan)
        return Advice(choice, largest, _because(plan, hardware, passed, show), checkpoints)
    return Advice(None, None, f"nothing fits: {passed[-1] if passed else 'there is no choice'}")


def _in_order(
    plans: Mapping[Choice, Plan], hardware: Hardware, *, can_checkpoint: bool
) -> Iterator[tuple[Choice, bool]]:
    """Choices as they are proposed, without and with activation checkpointing: that comes before the disk."""
    proposed = _proposed(plans, hardware)
    for on_disk in (False, True):
        for checkpoints in (False, True) if can_checkpoint else (False,):
            yield from ((choice, checkpoints) for choice in proposed if choice.needs_disk == on_disk)


def _may_fit_with_less_activations(plan: Plan, hardware: Hardware) -> bool:
    """Whether `plan` would fit if activations took nothing: only then a pass over the model can tell more."""
    activations = plan.device.get("activations", 0)
    return all(
        need.nbytes - (need.ranks * activations if need.of_device else 0) <= need.usable
        for need in hardware.needs(plan)
    )


def _proposed(plans: Mapping[Choice, Plan], hardware: Hardware) -> Sequence[Choice]:
    chosen = [choice for choice in plans if (choice.stage == 0) == (hardware.world_size == 1) or choice.stage == 3]
    # With one rank there is nothing to shard; with several, stage 1 communicates as much as stage 0 and keeps less.
    # Offload without stage 3 is for ranks on which the unsharded parameters fit.
    chosen += [choice for choice in plans if "optimizer" in choice.offloaded and choice not in chosen]
    chosen += [
        choice for choice in plans if choice.stage in (1, 2) and choice not in chosen and hardware.world_size > 1
    ]
    return sorted(dict.fromkeys(chosen), key=lambda choice: choice.cost)


def _because(plan: Plan, hardware: Hardware, passed: list[str], show: Callable[[float], str]) -> str:
    peak = plan.memory_peak if hardware.on_host else plan.device_peak
    needs = f"it needs {show(peak)} per rank"
    if not passed:
        return f"{needs}, and no other choice moves fewer bytes"
    return f"{needs}; {passed[-1]}"


def _largest_batch(
    plan_of: Callable[[int], Plan | None], hardware: Hardware, known: int, plan: Plan
) -> tuple[int, Plan]:
    """Largest power of two that fits, or `known`, which does; and its plan.

    Every plan is a pass over the model. The search begins where activations that grow with the batch would end.
    """
    sizes = [known, *(1 << power for power in range(MAX_BATCH.bit_length()) if 1 << power > known)]
    plans: dict[int, Plan] = {0: plan}

    def fits(place: int) -> bool:
        if place not in plans:
            if (planned := plan_of(sizes[place])) is None:
                return False
            plans[place] = planned
        return hardware.misfit(plans[place]) is None

    activations = max(plan.device.get("activations", 0), 1)
    room = min((need.usable - need.nbytes) / need.ranks for need in hardware.needs(plan))
    at = max(place for place, size in enumerate(sizes) if activations * (size / known - 1) <= room)
    while not fits(at):
        at -= 1
    while at + 1 < len(sizes) and fits(at + 1):
        at += 1
    return sizes[at], plans[at]


def as_json(choice: Choice, plan: Plan, hardware: Hardware) -> dict[str, Any]:
    """A row of the answer, for programs."""
    return {
        **dataclasses.asdict(choice),
        "device_bytes": plan.device_peak,
        "host_bytes_per_node": plan.host_peak * hardware.gpus,
        "disk_bytes_per_node": sum(plan.disk.values()) * hardware.gpus,
        "memory_peak_bytes": plan.memory_peak,
        "device": plan.device,
        "host": plan.host,
        "disk": plan.disk,
        "phases": plan.phases,
        "report": plan.report,
        "fits": hardware.misfit(plan) is None,
    }
