"""Every obeyed key has a configuration in which it matters, another value of it, and what a run shows of
both.

What is looked at is behind the configuration: what ranks send, what native code and torch's groups are made with,
which steps are made with which rates and scales, what is logged and written. Nothing of it may come from a field that
holds the key's own value.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import logging
import os
import re
import shutil
import sys
import threading
import types
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.config.schema import put
from hf_zero.engine.engine import ZeroEngine
from hf_zero.extras.activations import active
from hf_zero.extras.pipeline.batch_run import BatchRun
from hf_zero.native import aio
from hf_zero.storage.base import ShardStore
from tests.harness.torchao_path import use_torchao

WIDTH = 48
FOLDER = "FOLDER"  # in values: a folder of the job
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?( ?[KMGmun]?(s|B|MACs|FLOPS)?\b)?")
Seen = dict[str, Any]


@dataclass(frozen=True)
class Flip:
    """`value` instead of what `base` has (or of the default) changes what `scenario` shows."""

    value: Any
    base: dict[str, Any]  # dotted path -> value
    scenario: str = "train"
    device: str = "cpu"  # "lag": see tests/lag
    raises: bool = False  # one of the two runs is refused, which is the effect
    also: str = ""  # a key that goes with it only: it has the same value


# ---------------------------------------------------------------- what is looked at
class Recorder:
    """The recorder keeps what goes out of this process, and what is logged, while a scenario runs."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.lines: list[str] = []
        self.native: list[tuple[Any, ...]] = []
        self.timeouts: list[str] = []

    def watch(self, engine: ZeroEngine) -> None:
        original = engine.comm._record

        def record(op: str, what: str, full: torch.Tensor, **more: Any) -> None:
            self.sent.append((op, what, full.numel(), str(full.dtype)))
            original(op, what, full, **more)

        engine.comm._record = record  # type: ignore[method-assign]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        handler = logging.Handler(logging.INFO)
        handler.emit = self._line  # type: ignore[method-assign]
        roots = [logging.getLogger(name) for name in ("hf_zero", "hf_zero.lines", "hf_zero.start")]
        before = [root.level for root in roots]
        for root in roots:
            root.addHandler(handler)
            root.setLevel(logging.INFO)
        new_group, allocate = dist.new_group, os.posix_fallocate
        library: Any = aio._native()
        create = library.hz_aio_create

        def allocated(file: int, offset: int, size: int) -> None:
            self.native.append(("allocate", size))
            allocate(file, offset, size)

        def grouped(*args: Any, **kwargs: Any) -> Any:
            self.timeouts.append(str(kwargs["timeout"]))
            return new_group(*args, **kwargs)

        def created(options: Any, *rest: Any) -> Any:
            fields = options._obj
            self.native.append(tuple(getattr(fields, name) for name, *_ in fields._fields_))
            return create(options, *rest)

        dist.new_group, os.posix_fallocate = grouped, allocated
        library.hz_aio_create = created
        try:
            yield
        finally:
            dist.new_group, os.posix_fallocate = new_group, allocate
            library.hz_aio_create = create
            for root, level in zip(roots, before, strict=True):
                root.removeHandler(handler)
                root.setLevel(level)

    def _line(self, record: logging.LogRecord) -> None:
        """Not what only repeats the configuration: its text at the start, and notices."""
        text = record.getMessage()
        told = record.name == "hf_zero.engine.engine" and not text.startswith("hf_zero: stage")
        if not told and record.name != "hf_zero.start" and text not in self.lines:
            self.lines.append(_plain(text))


def _plain(text: str) -> str:
    """Return the text without numbers and their units, which times have in it."""
    return re.sub(r"\s+", " ", _NUMBER.sub("#", text))


def _store(store: ShardStore) -> tuple[Any, ...]:
    """Return what a store is, and how it was made."""
    made = [getattr(store, name, None) for name in ("_read_ahead", "_write_behind")]
    return type(store).__name__, *made, getattr(getattr(store, "_pool", None), "budget_bytes", None)


def plan(engine: ZeroEngine) -> Seen:
    """Return where everything lies, of which size and type."""
    placements = engine.placements
    units = [
        (flat.layout.name, flat.full.dtype, _store(flat.placement.param)[0], _store(flat.placement.master)[0])
        + (flat.placement.native, flat.placement.tile_numel, flat.placement.broadcasts)
        for unit in engine.units
        for flat in unit.flats
    ]
    swaps = [(name, _store(disk), disk.path.parents[3].name) for name, disk in placements.disks.items()]  # type: ignore[attr-defined]
    return {"units": units, "swaps": swaps}


def _steps(engine: ZeroEngine) -> Seen:
    """Rates, betas and scale as the next step has them."""
    optimizer = engine.optimizer
    if optimizer is None:
        return {}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"groups": repr(groups), "scale": optimizer.guard.scaler.cur_scale if optimizer.guard.scaler else None}


def _weights(engine: ZeroEngine) -> list[Any]:
    state = engine.full_state_dict(keep=True)
    return [(name, str(value.dtype), _digest(value)) for name, value in state.items()]


def _digest(value: torch.Tensor) -> str:
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(bytes(raw.tolist()), digest_size=8).hexdigest()


def _files(folder: Path) -> list[Any]:
    """Return names of files; lines of tables without their numbers; how much texts list, which have times in them."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"events\.out.*|vm-\d+-\w+|[a-z]+-\d+-[0-9a-f]{8}", "#", str(path.relative_to(folder)))
        text = path.read_text() if path.suffix in (".txt", ".csv") else ""
        found.append((name, _plain(text) if path.suffix == ".csv" else (text.count("\n"), text.count(","))))
    return found


# ---------------------------------------------------------------- scenarios
class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.tanh(self.linear(x)))


class Model(nn.Module):
    """Layers, one of which is used twice, and perhaps one parameter that is not used."""

    _no_split_modules = ("Layer",)

    def __init__(self, *, checkpointed: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Parameter(torch.ones(3)) if unused else None
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x).square().mean()


def _samples(count: int, *, equal: bool = False) -> TensorDataset:
    data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))
    return TensorDataset(data[:1].expand(count, WIDTH) if equal else data)


def _train(job: Job, *, factors: tuple[float, ...] = (1.0,), **options: Any) -> ZeroEngine:
    """Three epochs over nine samples; each loss times the next one of `factors`."""
    torch.manual_seed(0)
    model = Model(**options).to(job.device)
    data = _samples(9, equal=job.equal)
    engine, _, loader, _ = hf_zero.initialize(model=model, training_data=data, config=job.config, **job.given(model))
    job.engine = engine
    job.recorder.watch(engine)
    job.seen["plan"] = plan(engine)
    losses, steps = [], []
    factor = itertools.cycle(factors)
    for _ in range(3):
        for (batch,) in loader:
            loss = engine(batch.to(job.device))
            engine.backward(loss * next(factor))
            engine.step()
            losses.append(loss.item())
            steps.append(_steps(engine))
    job.seen |= {"losses": losses, "steps": steps, "usage": engine.memory_report()}
    engine.finish_updates()
    job.seen["weights"] = _weights(engine)
    return engine


def train(job: Job) -> None:
    _train(job)


def overflow(job: Job) -> None:
    _train(job, factors=(1.0, float("inf"), 1.0, float("inf"), float("inf"), 1.0, 1.0, 1.0))


def tiny(job: Job) -> None:
    """Train with gradients that hardly hold in fp16."""
    _train(job, factors=(1e-5,))


def float8(job: Job) -> None:
    use_torchao()
    _train(job)


def unused(job: Job) -> None:
    _train(job, unused=True)


def regions(job: Job) -> None:
    """Checkpointed regions, whose inputs are equal on the ranks of a group that shares them."""
    job.equal = True
    active.share_inputs(dist.group.WORLD)
    try:
        torch.manual_seed(0)
        model = Model(checkpointed=True).to(job.device)
        engine = hf_zero.initialize(model=model, config=job.config)[0]
        job.engine = engine
        usage = []
        waits = job.count_waits()
        for _ in range(2):
            loss = engine(torch.ones(4, WIDTH, device=job.device))
            usage.append(dict(active.usage()))
            engine.backward(loss)
            engine.step()
        job.seen |= {"usage": usage, "waits": waits(), "folder": _files(job.folder)}
    finally:
        active.share_inputs(None)


def saves(job: Job) -> None:
    """A checkpoint, and a model file."""
    engine = _train(job)
    engine.save_checkpoint(job.folder / "out", tag="one")
    job.seen["started"] = sorted(thread.name for thread in threading.enumerate() if "save" in thread.name)
    job.seen["operations"] = engine.comm._processes.log.last()  # what the ranks agree on
    engine.save_16bit_model(job.folder / "model")
    engine.finish_saves()


def tags(job: Job) -> None:
    engine = _train(job)
    engine.save_checkpoint(job.folder / "out", tag=f"rank{dist.get_rank()}")


def generate(job: Job) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, num_key_value_heads=1))
    engine = hf_zero.initialize(model=model, config=job.config)[0]
    job.engine = engine
    job.recorder.watch(engine)
    model.eval().generate(torch.tensor([[3, 4]]), max_new_tokens=4, pad_token_id=0, do_sample=False)


def pipeline(job: Job) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Dropout(0.5)]
    specs: list[Any] = [hf_zero.pipe.LayerSpec(nn.Linear, WIDTH, WIDTH), *layers]
    calls: list[int] = []

    def recompute(function: Any, *args: Any) -> Any:
        calls.append(len(args))
        return checkpoint(function, *args, use_reentrant=False)

    module = hf_zero.PipelineModule(specs, loss_fn=nn.functional.mse_loss, activation_checkpoint_func=recompute)
    engine = hf_zero.initialize(model=module, config=job.config)[0]
    job.engine = engine
    orders: list[str] = []
    original = BatchRun.run

    def run(self: BatchRun, order: Any, **options: Any) -> None:
        orders.append(str(order))
        original(self, order, **options)

    ones = torch.ones(1, WIDTH)
    with unittest.mock.patch.object(BatchRun, "run", run):
        losses = [engine.train_batch(iter([(ones * n, ones) for n in range(4)])).item() for _ in range(2)]
    job.seen |= {"parts": module.parts, "losses": losses, "calls": calls, "orders": orders}


def untested(job: Job) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(param.grad, alpha=group["lr"])

    job.optimizer = Own
    _train(job)


def rates(job: Job) -> None:
    """Show what a scheduler does with two groups over thirty steps."""
    model = nn.Linear(WIDTH, 1)
    groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias], "lr": 0.4}]
    engine, optimizer, _, scheduler = hf_zero.initialize(model=model, model_parameters=groups, config=job.config)
    job.engine = engine
    followed = []
    for _ in range(30):
        scheduler.step()
        followed.append([(group["lr"], group.get("betas")) for group in optimizer.param_groups])
    job.seen["rates"] = followed


def libraries(job: Job) -> None:
    """Stand in for wandb and comet_ml, which are not installed,:
    modules that keep what they are called with.
    """
    called: list[Any] = []

    class Anything:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return None if name == "run" else Anything(f"{self._name}.{name}")

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append((self._name, args, sorted(kwargs.items(), key=str)))
            return Anything(f"{self._name}()")

    for name in ("wandb", "comet_ml"):
        module: Any = types.ModuleType(name)
        module.__getattr__ = lambda inner, name=name: None if inner == "run" else Anything(f"{name}.{inner}")
        module.__version__ = "3.50"
        module.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
        sys.modules[name] = module
    try:
        _train(job)
    finally:
        del sys.modules["wandb"], sys.modules["comet_ml"]
    job.seen["called"] = [re.sub(r"<.*?>", "<>", repr(one)) for one in called]


def trainer(job: Job) -> None:
    """Train with more batches on one rank than on the other."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    row = {"input_ids": torch.arange(4), "labels": torch.arange(4)}
    args = hf_zero.TrainingArguments(
        output_dir=str(job.folder),
        zero=job.config,
        per_device_train_batch_size=job.config["train_micro_batch_size_per_gpu"],
        learning_rate=job.config["optimizer"]["params"]["lr"],
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    data = [row] * (4 + 2 * dist.get_rank())
    one = hf_zero.Trainer(model=LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32)), args=args, train_dataset=data)
    one.get_train_dataloader = lambda: DataLoader(data, batch_size=2)
    one.train()


def summary(job: Job) -> None:
    _train(job)
    hf_zero.comm.log_summary()


def lag(job: Job) -> None:
    """Train on a device that copies from the host's memory: how much of it is pinned."""
    from tests.lag import device

    gc.collect()
    torch.accelerator.synchronize()  # what earlier engines had is free
    before = device.pinned_bytes()
    _train(job)
    job.seen["pinned"] = device.pinned_bytes() - before


SCENARIOS: dict[str, Callable[[Job], None]] = {
    one.__name__: one
    for one in (lag, train, overflow, tiny, float8, unused, regions, saves, tags, generate, pipeline, untested, rates)
} | {"libraries": libraries, "summary": summary, "trainer": trainer}


@dataclass
class Job:
    """One run of a scenario."""

    config: dict[str, Any]
    folder: Path
    device: str

    def __post_init__(self) -> None:
        self.seen: Seen = {}
        self.recorder = Recorder()
        self.engine: ZeroEngine | None = None
        self.equal = False
        self.optimizer: Any = None

    def given(self, model: nn.Module) -> dict[str, Any]:
        return {} if self.optimizer is None else {"optimizer": self.optimizer(model.parameters())}

    def count_waits(self) -> Callable[[], int]:
        """Count how often this process waits for the whole device from now on."""
        counted, original = itertools.count(), torch.accelerator.synchronize

        def synchronize(*args: Any) -> None:
            next(counted)
            original(*args)

        torch.accelerator.synchronize = synchronize

        def end() -> int:
            torch.accelerator.synchronize = original
            return next(counted)

        return end


def observe(flat: dict[str, Any], scenario: str, folder: Path, device: str = "cpu") -> Seen:
    """Return what a run of `scenario` shows under the configuration of these dotted paths. All ranks must call."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    config: dict[str, Any] = {}
    for path, value in ((path, value) for path, value in flat.items() if value is not None):
        put(config, path, value.replace(FOLDER, str(folder)) if isinstance(value, str) else value)
    job = Job(config, folder, device)
    with job.recorder.active():
        try:
            SCENARIOS[scenario](job)
        except (hf_zero.ConfigError, hf_zero.StateError, hf_zero.CheckpointError, AssertionError) as error:
            text = str(error)
            if "in the ZeRO configuration" in text:
                raise  # the values of the table are ones that may stand there
            job.seen["error"] = _plain(text)
        finally:
            dist.barrier()
            job.seen["files"] = _files(folder)
            if job.engine is not None:
                job.engine.teardown()
            dist.barrier()
    job.seen |= {"sent": job.recorder.sent, "log": [line.replace(str(folder), "") for line in job.recorder.lines]}
    return job.seen | {"native": job.recorder.native, "timeouts": job.recorder.timeouts}


def changes(path: str, flip: Flip, folder: Path) -> list[str]:
    """Return the names under which the two runs differ; a run that differs from itself is no witness there."""
    base, device = {**BASE, **flip.base}, flip.device
    flipped = base | ({flip.also: flip.value} if flip.also else {}) | {path: flip.value}
    one, again = (observe(base, flip.scenario, folder, device) for _ in range(2))
    other = observe(flipped, flip.scenario, folder, device)
    assert flip.raises is ("error" in one or "error" in other), (path, one.get("error"), other.get("error"))
    assert "nan" not in repr(one.get("losses")), f"vacuous: the training for {path} diverges"
    stable = [name for name in one.keys() | other.keys() if one.get(name) == again.get(name)]
    return sorted(name for name in stable if one.get(name) != other.get(name))


# ---------------------------------------------------------------- the table
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer.type": "AdamW", "optimizer.params.lr": 0.001}
ZERO = "zero_optimization"
PARAM, OPT = f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer"
ACT = "activation_checkpointing"
STAGE_3 = {f"{ZERO}.stage": 3, f"{ZERO}.stage3_param_persistence_threshold": 0}
CPU = {f"{ZERO}.stage": 2, f"{OPT}.device": "cpu"}
DISK = {**STAGE_3, f"{OPT}.device": "nvme", f"{OPT}.nvme_path": f"{FOLDER}/a"}
PARAMS_ON_DISK = {**STAGE_3, f"{PARAM}.device": "nvme", f"{PARAM}.nvme_path": f"{FOLDER}/a", f"{PARAM}.max_in_cpu": 0}
FP16 = {f"{ZERO}.stage": 1, "fp16.enabled": True, "fp16.initial_scale_power": 4, "fp16.loss_scale_window": 2}
AMP = {"amp.enabled": True}
PROFILE = {"flops_profiler.enabled": True, "flops_profiler.output_file": f"{FOLDER}/flops.txt"}
PIPE = {"pipeline.stages": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
SHARED = {f"{ACT}.partition_activations": True, f"{ACT}.number_checkpoints": 4}
ARENA = {**SHARED, f"{ACT}.contiguous_memory_optimization": True}
COMMS = {"comms_logger.enabled": True, f"{ZERO}.stage": 3}


def _monitor(name: str) -> dict[str, Any]:
    return {f"{name}.enabled": True, f"{name}.output_path": f"{FOLDER}/a"}


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {
        f"{ZERO}.stage": 1,
        "optimizer.type": kind,
        **{f"optimizer.params.{name}": v for name, v in params.items()},
    }


def _scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler.type": kind, **{f"scheduler.params.{name}": value for name, value in params.items()}}


CYCLE = _scheduler("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.4, cycle_first_step_size=6, decay_step_size=3)
RANGE = _scheduler("LRRangeTest", lr_range_test_step_size=5)
WARMUP = _scheduler("WarmupLR", warmup_num_steps=6)
COSINE = _scheduler("WarmupCosineLR", warmup_num_steps=6, total_num_steps=20)
ADAM, MUON, LAMB = _optimizer("AdamW"), _optimizer("Muon"), _optimizer("Lamb", weight_decay=0.1)

FLIPS: dict[str, Flip] = {
    "train_batch_size": Flip(8, {}),
    "train_micro_batch_size_per_gpu": Flip(1, {}),
    "gradient_accumulation_steps": Flip(2, {}),
    "gradient_clipping": Flip(1e-3, {"optimizer.type": "SGD"}),
    "communication_data_type": Flip("bf16", {}),
    "prescale_gradients": Flip(True, {"communication_data_type": "fp16"}, "tiny"),
    "gradient_predivide_factor": Flip(3.0, {"communication_data_type": "bf16"}),
    "managed_gradient_accumulation": Flip(False, {"gradient_accumulation_steps": 2}),
    "gradient_allreduce_op": Flip("sum", {"optimizer.type": "SGD"}),
    "zero_allow_untested_optimizer": Flip(
        True, {f"{ZERO}.stage": 1, "optimizer.type": None, "optimizer.params.lr": None}, "untested", raises=True
    ),
    "keep_fp32": Flip(["*norm*"], {"bf16.enabled": True}),
    "desync_timeout": Flip(90, {}),
    "gather_for_generation": Flip("stream", {**STAGE_3, "gather_for_generation": "once"}, "generate"),
    "uneven_data": Flip("join", {}, "trainer", raises=True),
    "dataloader_drop_last": Flip(True, {}),
    "steps_per_print": Flip(1, {}),
    "wall_clock_breakdown": Flip(True, {}),
    "memory_breakdown": Flip(True, {}),
    "dump_state": Flip(True, {}),
    f"{ZERO}.stage": Flip(2, {}),
    f"{ZERO}.sharding_group": Flip(1, {f"{ZERO}.stage": 3, f"{ZERO}.stage3_param_persistence_threshold": 0}),
    f"{ZERO}.hybrid_shard": Flip(True, {f"{ZERO}.stage": 3, f"{ZERO}.sharding_group": 1}),
    f"{ZERO}.zero_quantized_weights": Flip(True, {**STAGE_3, f"{ZERO}.sharding_group": 1}),
    f"{ZERO}.zero_quantized_gradients": Flip(True, {f"{ZERO}.stage": 2, f"{ZERO}.sharding_group": 1}),
    f"{ZERO}.reduce_scatter": Flip(False, {f"{ZERO}.stage": 2}),
    f"{ZERO}.reduce_bucket_size": Flip(16, {f"{ZERO}.stage": 2}),
    f"{ZERO}.allgather_partitions": Flip(False, {f"{ZERO}.stage": 2}),
    f"{ZERO}.allgather_bucket_size": Flip(16, {f"{ZERO}.stage": 2}),
    f"{ZERO}.overlap_comm": Flip(False, STAGE_3),
    f"{ZERO}.sub_group_size": Flip(16, CPU),
    f"{ZERO}.stage3_prefetch_bucket_size": Flip(0, STAGE_3),
    f"{ZERO}.stage3_param_persistence_threshold": Flip(10000, STAGE_3),
    f"{ZERO}.stage3_model_persistence_threshold": Flip(
        0, {**STAGE_3, f"{ZERO}.stage3_param_persistence_threshold": 48}
    ),
    f"{ZERO}.stage3_max_live_parameters": Flip(0, STAGE_3),
    f"{ZERO}.stage3_max_reuse_distance": Flip(10**6, STAGE_3),
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": Flip(False, STAGE_3, "saves"),
    f"{ZERO}.ignore_unused_parameters": Flip(False, {}, "unused", raises=True),
    f"{PARAM}.device": Flip("cpu", STAGE_3),
    f"{PARAM}.nvme_path": Flip(f"{FOLDER}/b", PARAMS_ON_DISK),
    f"{PARAM}.buffer_count": Flip(9, PARAMS_ON_DISK),
    f"{PARAM}.buffer_size": Flip(8, PARAMS_ON_DISK),
    f"{PARAM}.max_in_cpu": Flip(100, PARAMS_ON_DISK),
    f"{PARAM}.pin_memory": Flip(False, {**STAGE_3, f"{PARAM}.device": "cpu"}, "lag", "lag"),
    f"{OPT}.device": Flip("cpu", {f"{ZERO}.stage": 2}),
    f"{OPT}.nvme_path": Flip(f"{FOLDER}/b", DISK),
    f"{OPT}.buffer_count": Flip(9, DISK),
    f"{OPT}.pin_memory": Flip(False, CPU, "lag", "lag"),
    f"{OPT}.pipeline_read": Flip(False, DISK),
    f"{OPT}.pipeline_write": Flip(False, DISK),
    f"{OPT}.fast_init": Flip(True, DISK),
    f"{OPT}.ratio": Flip(0.5, {**STAGE_3, f"{OPT}.device": "cpu"}),
    f"{OPT}.delayed_update": Flip(True, CPU),
    f"{OPT}.delayed_update_start": Flip(3, {**CPU, f"{OPT}.delayed_update": True}),
    "aio.block_size": Flip(1 << 16, DISK),
    "aio.queue_depth": Flip(3, DISK),
    "aio.intra_op_parallelism": Flip(2, DISK),
    "aio.single_submit": Flip(True, DISK),
    "aio.overlap_events": Flip(False, DISK),
    "checkpoint.async": Flip(True, {}, "saves"),
    "checkpoint.tag_validation": Flip("Fail", {}, "tags", raises=True),
    "checkpoint.use_node_local_storage": Flip(True, {}, "saves"),
    **{
        f"{name}.enabled": Flip(True, {f"{name}.output_path": f"{FOLDER}/a"})
        for name in ("tensorboard", "csv_monitor")
    },
    **{f"{name}.output_path": Flip(f"{FOLDER}/b", _monitor(name)) for name in ("tensorboard", "csv_monitor")},
    **{f"{name}.job_name": Flip("other", _monitor(name)) for name in ("tensorboard", "csv_monitor")},
    "flops_profiler.enabled": Flip(True, {"flops_profiler.output_file": f"{FOLDER}/flops.txt"}),
    "flops_profiler.profile_step": Flip(10**6, PROFILE),
    "flops_profiler.module_depth": Flip(0, PROFILE),
    "flops_profiler.top_modules": Flip(3, PROFILE),
    "flops_profiler.detailed": Flip(False, PROFILE),
    "flops_profiler.output_file": Flip(f"{FOLDER}/b.txt", PROFILE),
    "wandb.enabled": Flip(True, {}, "libraries"),
    **{f"wandb.{name}": Flip("x", {"wandb.enabled": True}, "libraries") for name in ("group", "team", "project")},
    "comet.enabled": Flip(True, {}, "libraries"),
    "comet.samples_log_interval": Flip(1, {"comet.enabled": True}, "libraries"),
    **{
        f"comet.{name}": Flip("x", {"comet.enabled": True}, "libraries")
        for name in ("project", "workspace", "api_key", "experiment_name", "experiment_key")
    },
    "comet.online": Flip(False, {"comet.enabled": True}, "libraries"),
    "comet.mode": Flip("create", {"comet.enabled": True}, "libraries"),
    "comms_logger.enabled": Flip(True, {}, "summary", raises=True),
    "comms_logger.verbose": Flip(True, COMMS, "summary"),
    "comms_logger.prof_all": Flip(False, COMMS, "summary"),
    "comms_logger.prof_ops": Flip(["all_gather_into_tensor"], {**COMMS, "comms_logger.prof_all": False}, "summary"),
    "comms_logger.debug": Flip(True, COMMS, "summary"),
    f"{ACT}.partition_activations": Flip(True, {}, "regions"),
    f"{ACT}.cpu_checkpointing": Flip(True, {f"{ZERO}.stage": 1}, "regions", "lag"),
    f"{ACT}.contiguous_memory_optimization": Flip(True, SHARED, "regions"),
    f"{ACT}.number_checkpoints": Flip(2, ARENA, "regions", raises=True),
    f"{ACT}.synchronize_checkpoint_boundary": Flip(True, {f"{ZERO}.stage": 1}, "regions", "lag"),
    f"{ACT}.profile": Flip(True, {}, "regions"),
    f"{ACT}.activation_memory": Flip("1GB", {}, "regions"),
    "pipeline.stages": Flip(1, PIPE, "pipeline"),
    "pipeline.partition": Flip("type:linear", PIPE, "pipeline"),
    "pipeline.seed_layers": Flip(True, PIPE, "pipeline"),
    "pipeline.activation_checkpoint_interval": Flip(1, PIPE, "pipeline"),
    "pipeline.schedule": Flip("gpipe", PIPE, "pipeline"),
    "pipeline.virtual_stages": Flip(2, PIPE, "pipeline"),
    "fp16.enabled": Flip(True, {}),
    "fp16.loss_scale": Flip(8, FP16, "overflow"),
    "fp16.initial_scale_power": Flip(6, FP16, "overflow"),
    "fp16.loss_scale_window": Flip(1, FP16, "overflow"),
    "fp16.hysteresis": Flip(1, FP16, "overflow"),
    "fp16.consecutive_hysteresis": Flip(True, {**FP16, "fp16.loss_scale_window": 100}, "overflow"),
    "fp16.min_loss_scale": Flip(16, FP16, "overflow", raises=True),
    "msamp.enabled": Flip(True, {}, "float8"),
    "msamp.opt_level": Flip("O2", {"msamp.enabled": True}, "float8"),
    "msamp.use_te": Flip(True, {"msamp.enabled": True}, "float8", raises=True),
    "bf16.enabled": Flip(True, {}),
    "bf16.check_grad_overflow": Flip(False, {"bf16.enabled": True}, "overflow"),
    "amp.enabled": Flip(True, {}),
    "amp.opt_level": Flip("O3", {**AMP, "amp.opt_level": "O2"}),
    "amp.loss_scale": Flip(4, AMP),
    "torch_autocast.enabled": Flip(True, {"torch_autocast.dtype": "bf16"}),
    "torch_autocast.dtype": Flip("fp16", {"torch_autocast.enabled": True}),
    "bf16.bf16_master_weights_and_grads": Flip(True, {"bf16.enabled": True}, also="bf16.bf16_optimizer_states"),
    "bf16.bf16_optimizer_states": Flip(True, {"bf16.enabled": True}, also="bf16.bf16_master_weights_and_grads"),
    "data_types.grad_accum_dtype": Flip("bf16", {"bf16.enabled": True, "gradient_accumulation_steps": 2}),
    "optimizer.type": Flip("SGD", {}),
    "optimizer.params.lr": Flip(0.01, {}),
    "optimizer.params.betas": Flip([0.5, 0.6], ADAM),
    "optimizer.params.eps": Flip(0.1, ADAM),
    "optimizer.params.weight_decay": Flip(0.5, ADAM),
    "optimizer.params.rho": Flip(0.5, _optimizer("Adadelta")),
    "optimizer.params.momentum": Flip(0.9, _optimizer("SGD")),
    "optimizer.params.dampening": Flip(0.5, _optimizer("SGD", momentum=0.9)),
    "optimizer.params.lr_decay": Flip(0.5, _optimizer("Adagrad")),
    "optimizer.params.initial_accumulator_value": Flip(0.5, _optimizer("Adagrad")),
    "optimizer.params.alpha": Flip(0.5, _optimizer("RMSprop")),
    "optimizer.params.lambd": Flip(0.5, _optimizer("ASGD")),
    "optimizer.params.t0": Flip(1, _optimizer("ASGD")),
    "optimizer.params.momentum_decay": Flip(0.5, _optimizer("NAdam")),
    "optimizer.params.max_coeff": Flip(0.02, LAMB),
    "optimizer.params.min_coeff": Flip(5.0, LAMB),
    "optimizer.params.muon_lr": Flip(0.5, MUON),
    "optimizer.params.adam_lr": Flip(0.5, MUON),
    "optimizer.params.freeze_step": Flip(1, {**_optimizer("OneBitAdam"), f"{ZERO}.stage": 0}),
    "optimizer.params.beta2_decay": Flip(-0.1, _optimizer("Adafactor")),
    "optimizer.params.d": Flip(2.0, _optimizer("Adafactor", lr=1.0)),
    "optimizer.params.ns_method": Flip("standard", _optimizer("Muon", ns_method="gram")),
    "optimizer.params.etas": Flip([0.1, 3.0], _optimizer("Rprop")),
    "optimizer.params.step_sizes": Flip([1e-4, 0.06], _optimizer("Rprop")),
    "optimizer.params.amsgrad": Flip(True, ADAM),
    "optimizer.params.maximize": Flip(True, ADAM),
    "optimizer.params.capturable": Flip(True, ADAM, raises=True),
    "optimizer.params.nesterov": Flip(True, _optimizer("SGD", momentum=0.9)),
    "optimizer.params.centered": Flip(True, _optimizer("RMSprop")),
    "optimizer.params.fused": Flip(False, ADAM),
    "optimizer.params.foreach": Flip(True, ADAM),
    "optimizer.params.decoupled_weight_decay": Flip(False, _optimizer("Adam", weight_decay=0.5)),
    "optimizer.params.eps_inside_sqrt": Flip(True, LAMB),
    "optimizer.params.torch_adam": Flip(True, {**ADAM, **CPU}),
    "optimizer.params.adam_w_mode": Flip(False, _optimizer("Adam", weight_decay=0.5)),
    "optimizer.params.bias_correction": Flip(False, ADAM),
    "optimizer.params.fp32_optimizer_states": Flip(False, {**ADAM, **CPU}),
    "scheduler.type": Flip("LRRangeTest", {"scheduler.type": "WarmupLR"}, "rates"),
    "scheduler.params.warmup_min_lr": Flip(0.1, WARMUP, "rates"),
    "scheduler.params.warmup_max_lr": Flip(0.9, WARMUP, "rates"),
    "scheduler.params.warmup_num_steps": Flip(9, WARMUP, "rates"),
    "scheduler.params.total_num_steps": Flip(25, COSINE, "rates"),
    "scheduler.params.warmup_type": Flip("linear", WARMUP, "rates"),
    "scheduler.params.warmup_min_ratio": Flip(0.5, COSINE, "rates"),
    "scheduler.params.cos_min_ratio": Flip(0.5, COSINE, "rates"),
    "scheduler.params.cycle_min_lr": Flip(0.2, CYCLE, "rates"),
    "scheduler.params.cycle_max_lr": Flip(0.5, CYCLE, "rates"),
    "scheduler.params.cycle_min_mom": Flip(0.5, CYCLE, "rates"),
    "scheduler.params.cycle_max_mom": Flip(0.95, CYCLE, "rates"),
    "scheduler.params.decay_lr_rate": Flip(0.5, CYCLE, "rates"),
    "scheduler.params.decay_mom_rate": Flip(0.01, CYCLE, "rates"),
    "scheduler.params.cycle_first_step_size": Flip(9, CYCLE, "rates"),
    "scheduler.params.cycle_second_step_size": Flip(9, CYCLE, "rates"),
    "scheduler.params.decay_step_size": Flip(5, {**CYCLE, "scheduler.params.decay_lr_rate": 0.5}, "rates"),
    "scheduler.params.cycle_first_stair_count": Flip(2, CYCLE, "rates"),
    "scheduler.params.cycle_second_stair_count": Flip(2, CYCLE, "rates"),
    "scheduler.params.cycle_momentum": Flip(False, CYCLE, "rates"),
    "scheduler.params.lr_range_test_min_lr": Flip(0.1, RANGE, "rates"),
    "scheduler.params.lr_range_test_step_rate": Flip(3.0, RANGE, "rates"),
    "scheduler.params.lr_range_test_step_size": Flip(9, RANGE, "rates"),
    "scheduler.params.lr_range_test_staircase": Flip(True, RANGE, "rates"),
    "zero_force_ds_cpu_optimizer": Flip(False, CPU),
    "timers.throughput.enabled": Flip(False, {"steps_per_print": 1}),
}
