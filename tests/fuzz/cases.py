"""A case: everything that one run of the fuzz test does, drawn from (seed, number) alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import torch

from tests.fuzz import models_flow, models_hf, models_shapes  # noqa: F401  (they fill the table)
from tests.fuzz.optimizers import NAMES as OPTIMIZERS
from tests.fuzz.optimizers import NATIVE, SHARP
from tests.fuzz.registry import MODELS, Model

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
SLOW_SHARE = 0.5  # of the turns of a slow model are another one's
SCHEDULES = ("", "", "", "lambda", "step", "onecycle")
# Ways to train a micro-batch; see `train.WAYS`.
PLAIN_WAYS = ("engine", "engine", "direct")
MORE_WAYS = (
    *("retain", "two losses", "two forwards", "reversed", "evaluate", "abandon"),
    *("drop by engine", "drop by optimizer", "drop by module"),
)
ONCE_WAYS = ("evaluate",)
# Events before a step; see `train.EVENTS`.
EVENTS = (
    *("write", "set", "read", "look", "evaluate", "rate", "scale gradients", "freeze", "thaw"),
    *("reload", "load weights", "copy", "states"),
)

Pairs = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps of one engine. The next phase resumes from the checkpoint of this one, under another configuration."""

    world: int = 2
    stage: int = 3
    offload_optimizer: str = "none"
    offload_param: str = "none"
    steps: int = 3
    zero: Pairs = ()  # further keys of zero_optimization
    offload: Pairs = ()  # further keys of offload_optimizer


@dataclasses.dataclass(frozen=True)
class Case:
    """Defaults are the plainest run: `campaign.shrink` goes towards them."""

    model: str
    seed: int = 0
    number: int = 0
    dtype: str = "fp64"
    optimizer: str = "SGD"
    block: bool = False  # named in the configuration, not brought
    implementation: str = ""  # "foreach", "fused"
    groups: int = 1
    all_params: bool = False  # frozen parameters are given to the optimizer too
    schedule: str = ""
    accumulation: int = 1
    clip: float = 0.0
    clip_by_call: bool = False
    no_sync: bool = False
    way: str = "engine"
    events: tuple[tuple[int, str], ...] = ()  # (before which step, what)
    every_step: bool = False  # compare weights after every step; a gather can hide what would go wrong without
    teardown: bool = False  # compare what teardown leaves, not what full_state_dict gives
    top: Pairs = ()  # further keys at the top of the configuration
    phases: tuple[Phase, ...] = (Phase(),)

    def __str__(self) -> str:
        """The fields that are not as plain as can be."""
        plain = Case(self.model)
        shown = [f"model={self.model!r}"]
        for field in dataclasses.fields(self)[3:-1]:
            if getattr(self, field.name) != getattr(plain, field.name):
                shown.append(f"{field.name}={getattr(self, field.name)!r}")
        return f"case {self.seed}:{self.number} ({', '.join(shown)})" + "".join(f"\n    {p}" for p in self.phases)

    @property
    def row(self) -> Model:
        return MODELS[self.model]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


def config_of(case: Case, phase: Phase, folder: str) -> dict[str, Any]:
    """The configuration of a phase, but for its optimizer block."""
    zero: dict[str, Any] = {"stage": phase.stage, **dict(phase.zero)}
    if phase.offload_optimizer != "none":
        zero["offload_optimizer"] = _medium(phase.offload_optimizer, folder) | dict(phase.offload)
    if phase.offload_param != "none":
        zero["offload_param"] = _medium(phase.offload_param, folder) | {"max_in_cpu": 0}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.0 if case.clip_by_call else case.clip,
        "desync_timeout": 12,
        "zero_optimization": zero,
        **dict(case.top),
    }
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def _medium(device: str, folder: str) -> dict[str, Any]:
    return {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})


# ---------------------------------------------------------------- drawing one
def draw(seed: int, number: int) -> Case:
    """Case `number` of `seed`. Models take turns, so that every stretch of `len(MODELS)` cases has each of them."""
    rng = random.Random(f"{seed}/{number}")
    model = _model_in_turn(seed, number, rng)
    dtype = _dtype(model, rng)
    optimizer = rng.choice([name for name in OPTIMIZERS if not _unfit(name, model, dtype)])
    phases = _phases(model, optimizer, rng)
    block = OPTIMIZERS[optimizer].block is not None and (rng.random() < 0.3 or OPTIMIZERS[optimizer].make is None)
    case = Case(
        model.name,
        seed,
        number,
        dtype=dtype,
        optimizer=optimizer,
        block=block,
        implementation=rng.choice(("", "", *OPTIMIZERS[optimizer].implementations)) if not block else "",
        groups=1 if block else rng.choice((1, 2)),
        all_params=not block and rng.random() < 0.3,
        schedule=rng.choice(SCHEDULES),
        accumulation=1 if model.has("hooks") and model.has("once") else rng.choice((1, 1, 2, 3)),
        clip=rng.choice((0.0, 0.05, 0.5)),
        clip_by_call=rng.random() < 0.3,
        no_sync=rng.random() < 0.2,
        way=_way(model, rng),
        every_step=rng.random() < 0.5,
        teardown=rng.random() < 0.3,
        top=_top(phases, rng),
        phases=phases,
    )
    return dataclasses.replace(case, events=_events(case, rng))


def _model_in_turn(seed: int, number: int, rng: random.Random) -> Model:
    names = sorted(MODELS)
    random.Random(f"{seed}/round {number // len(names)}").shuffle(names)
    model = MODELS[names[number % len(names)]]
    if model.has("slow") and number >= len(names) and rng.random() < SLOW_SHARE:
        model = MODELS[rng.choice([name for name in names if not MODELS[name].has("slow")])]
    return model


def _unfit(optimizer: str, model: Model, dtype: str) -> bool:
    """Whether `optimizer` makes a difference of rounding errors."""
    sharp = optimizer in SHARP and (model.has("noise") or dtype != "fp64")
    return sharp or (optimizer == "Adafactor" and model.has("empty"))


def _dtype(model: Model, rng: random.Random) -> str:
    if model.has("single"):
        return "fp32"
    if model.has("typed", "noise", "buffers", "once", "hooks", "wide"):
        return "fp64" if model.has("typed") else rng.choice(("fp64", "fp64", "fp32"))
    return rng.choice(("fp64",) * 6 + ("fp32", "bf16"))


def _phases(model: Model, optimizer: str, rng: random.Random) -> tuple[Phase, ...]:
    """Mostly one; else two with a checkpoint between them, at another stage, medium and world size."""
    phases = [_phase(model, optimizer, rng)]
    if rng.random() < 0.2:
        phases = [dataclasses.replace(phases[0], steps=2), dataclasses.replace(_phase(model, optimizer, rng), steps=2)]
    return tuple(phases)


def _phase(model: Model, optimizer: str, rng: random.Random) -> Phase:
    world = 2 if model.has("slow") else rng.choice((1, 2, 2, 2, 2, 3, 3))
    stage = rng.choice((0, 1, 2, 3, 3, 3))
    native = optimizer in NATIVE or rng.random() < 0.04  # that others are refused need not be seen often
    medium = rng.choice(("none", "none", "cpu", "nvme")) if stage > 0 and native else "none"
    params = rng.choice(("none", "none", "cpu", "nvme")) if stage == 3 else "none"
    more: list[tuple[str, Any]] = []
    if medium != "none":
        more = _some(
            rng, 0.25, pipeline_read=(False,), pipeline_write=(False,), buffer_count=(1, 2), fast_init=(True,)
        )
        more += _some(rng, 0.2, ratio=(0.3, 0.7)) if stage == 3 else []
    zero = _zero_keys(stage, rng)
    if stage > 0 and world > 1 and rng.random() < 0.3:
        world, zero = _in_groups(world, zero, rng)
    return Phase(world, stage, medium, params, rng.choice((2, 3, 3)), zero, tuple(more))


def _in_groups(world: int, zero: Pairs, rng: random.Random) -> tuple[int, Pairs]:
    """Return the number of ranks, in groups, and the keys that groups can have."""
    world, size = rng.choice(((world, 1), (world, 1), (4, 2)))
    without = ("reduce_scatter", "allgather_partitions")
    hybrid = _some(rng, 0.5, hybrid_shard=(True,))
    return world, (*((key, value) for key, value in zero if key not in without), ("sharding_group", size), *hybrid)


def _zero_keys(stage: int, rng: random.Random) -> Pairs:
    keys = _some(
        rng,
        0.3,
        reduce_bucket_size=(7, 97, 850),
        allgather_bucket_size=(13, 97),
        sub_group_size=(61, 307),
        overlap_comm=(False,),
        reduce_scatter=(False,),
        allgather_partitions=(False,),
        round_robin_gradients=(True,),
    )
    if stage == 3:
        keys.append(("stage3_param_persistence_threshold", rng.choice((0, 0, 0, 12, 150, 10**6))))
        keys += _some(
            rng,
            0.35,
            stage3_prefetch_bucket_size=(0, 1, 200),
            stage3_max_live_parameters=(0, 300),
            stage3_max_reuse_distance=(0, 150, 10**9),
        )
    return tuple(keys)


def _some(rng: random.Random, share: float, **choices: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return [(key, rng.choice(values)) for key, values in choices.items() if rng.random() < share]


def _top(phases: tuple[Phase, ...], rng: random.Random) -> Pairs:
    top = _some(rng, 0.15, prescale_gradients=(True,), zero_force_ds_cpu_optimizer=(False,))
    if dict(top).get("prescale_gradients"):
        top += _some(rng, 0.5, gradient_predivide_factor=(2.0,))
    return tuple(top)


def _way(model: Model, rng: random.Random) -> str:
    ways = PLAIN_WAYS
    if rng.random() < 0.5:
        ways = ONCE_WAYS if model.has("once") else MORE_WAYS
    if model.has("writes"):
        ways = PLAIN_WAYS
    return rng.choice(ways)


def _events(case: Case, rng: random.Random) -> tuple[tuple[int, str], ...]:
    found: list[tuple[int, str]] = []
    if case.row.has("writes"):
        return ()
    while rng.random() < 0.35 and len(found) < 3:
        event = rng.choice(EVENTS)
        if event in ("evaluate", "reload") and case.row.has("once", "buffers"):
            continue
        if event == "copy" and case.row.has("uncopied"):
            continue
        found.append((rng.randrange(case.steps), event))
    return tuple(sorted(found))


# ---------------------------------------------------------------- what may be refused
def expected_errors(case: Case) -> Mapping[str, str]:
    """Return the class of an error that is right for this case -> what its message must contain."""
    expected: dict[str, str] = {}
    on_demand = any(phase.stage == 3 for phase in case.phases)
    offloaded = any(phase.offload_optimizer != "none" for phase in case.phases)
    if case.row.has("reads") and on_demand:
        expected["StateError"] = "gathered_params"
    if case.row.has("writes") and on_demand:
        expected["StateError"] = "weight"
    if offloaded and case.optimizer not in NATIVE:
        expected["ConfigError"] = "offload"
    if case.row.has("typed") and case.optimizer == "Adafactor" and any(phase.stage > 0 for phase in case.phases):
        expected["ConfigError"] = "several types"
    return expected
