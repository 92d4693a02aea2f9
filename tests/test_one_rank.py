"""Every call that all ranks must make is made on one rank only: all ranks raise, soon, and name the user's own line.

The calls are those whose documentation says so. One that is documented and not tried here fails
`test_every_documented_call_is_tried`.
"""

from __future__ import annotations

import datetime
import importlib
import inspect
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

import hf_zero
from hf_zero.extras.pipeline.pipeline_engine import PipelineEngine
from hf_zero.extras.pipeline.pipeline_section import PipelineSection
from hf_zero.hf.accelerator.optimizer import ZeroAcceleratedOptimizer
from hf_zero.hf.accelerator.plugin import ZeroAcceleratorMixin
from hf_zero.hf.models.generation import _Calls
from hf_zero.hf.models.saving import _Saving
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.pipeline import LayerSpec, PipelineModule
from tests.harness.ranks import run_ranks
from tests.hf import runs

DESYNC_S = 5
SOON_S = 4 * DESYNC_S
PHRASE = re.compile(r"\b[Aa]ll ranks( of the (run|world))? must\b")
MODULES = ("hf_zero", "hf_zero.zero", "hf_zero.comm", "hf_zero.checkpointing", "hf_zero.pipeline", "hf_zero.optim")
# Torch's rendezvous, which says by itself how many processes have come: tried by itself.
OTHERWISE = {"init_distributed"}
# Users get their results from these, and from the methods that take the place of a model's own.
CLASSES = (
    PipelineEngine,
    ShardedOptimizer,
    ZeroAcceleratedOptimizer,
    ZeroAcceleratorMixin,
    _Saving,
    _Calls,
)


def documented() -> dict[str, Any]:
    """Name -> function or class whose documentation says that all ranks must call it."""
    found: dict[str, Any] = {}

    def look_at(one: Any) -> None:
        if not str(getattr(one, "__module__", "")).startswith("hf_zero"):
            return
        if PHRASE.search(" ".join((one.__doc__ or "").split())):
            found[one.__qualname__] = one
        for name in dir(one) if inspect.isclass(one) else ():
            member = inspect.getattr_static(one, name)
            member = getattr(member, "__func__", getattr(member, "fget", member))
            if not name.startswith("_") and inspect.isroutine(member):
                look_at(member)

    for module in map(importlib.import_module, MODULES):
        own = [name for name, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", own):
            look_at(getattr(module, name))
    for kind in CLASSES:
        look_at(kind)
    return found


# ---------------------------------------------------------------- the programs
class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.late = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(torch.tanh(self.second(torch.tanh(self.first(x)))))


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "desync_timeout": DESYNC_S,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def build() -> Net:
    torch.manual_seed(0)
    return Net()


class Loop:
    """A plain loop between backward and step, with an average, a second model and a checkpoint."""

    def __init__(self, stage: int, folder: str, **more: Any) -> None:
        self.stage, self.folder = stage, folder
        self.model, self.other = build(), build()
        params = [param for param in self.model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=0.1)
        more = {"comms_logger": {"enabled": True}, **more}
        self.engine = hf_zero.initialize(model=self.model, optimizer=optimizer, config=config(stage, **more))[0]
        hf_zero.shard(self.other, config(stage))
        self.ema = hf_zero.ShardedEMA(self.model, 0.5)
        self.weight = self.model.first.weight
        self.backward()
        self.engine.step()
        self.engine.save_checkpoint(folder, "saved")
        self.full = self.engine.full_state_dict(keep=True)
        self.backward()

    def backward(self) -> None:
        self.engine.backward(self.engine(torch.ones(2, 6)).square().mean())

    def go_on(self) -> None:
        self.engine.step()
        self.backward()
        self.engine.step()
        self.engine.full_state_dict(keep=False)

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer

    @property
    def piece(self) -> torch.Tensor | None:
        piece = hf_zero.local_param(self.weight)
        return None if piece is None else piece.values

    @property
    def place(self) -> Any:
        from hf_zero.access.param_location import find_parameter

        return find_parameter(self.weight, None)


class Windows(Loop):
    """The program stands within an accumulation window, with accumulated gradients."""

    def __init__(self, stage: int, folder: str) -> None:
        super().__init__(stage, folder, gradient_accumulation_steps=2)


class Accelerated:
    def __init__(self, stage: int, folder: str) -> None:
        self.folder = folder
        self.accelerator = Accelerator(cpu=True)
        hf_zero.ZeroPlugin(config(stage)).attach(self.accelerator)
        model = build()
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        self.accelerator.save_state(folder)
        self.backward()

    def backward(self) -> None:
        self.accelerator.backward(self.model(torch.ones(2, 6)).square().mean())

    def go_on(self) -> None:
        self.optimizer.step()
        self.backward()
        self.optimizer.step()
        self.accelerator.get_state_dict(self.model)
        self.accelerator.save_state(self.folder)


class Pipeline:
    def __init__(self, stage: int, folder: str) -> None:
        self.folder = folder
        layers = [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]
        self.module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        more = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "gradient_accumulation_steps": 2}
        self.engine = hf_zero.initialize(model=self.module, config=config(min(stage, 1), **more))[0]
        self.engine.train_batch(self.batches())
        self.engine.save_checkpoint(folder, "saved")
        self.full = self.engine.full_state_dict(keep=True)

    def batches(self) -> Iterator[Any]:
        return iter([(torch.ones(2, 6), torch.zeros(2, 6))] * 2)

    def go_on(self) -> None:
        self.engine.train_batch(self.batches())
        self.engine.full_state_dict(keep=False)


class Llama:
    """A model of transformers."""

    def __init__(self, stage: int, folder: str) -> None:
        self.folder, self.model = folder, runs.build()
        self.engine = hf_zero.initialize(
            model=self.model, config=config(stage, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
        )[0]
        self.model.eval()

    def go_on(self) -> None:
        ids = torch.arange(12).view(2, 6)
        self.engine.backward(self.model(input_ids=ids, labels=ids).loss)
        self.engine.step()
        self.engine.full_state_dict(keep=False)


class Training:
    def __init__(self, stage: int, folder: str) -> None:
        zero = {**config(stage), "train_micro_batch_size_per_gpu": "auto"}
        args = hf_zero.TrainingArguments(**runs.arguments(folder, max_steps=1), zero=zero)
        self.folder = folder
        self.trainer = hf_zero.Trainer(runs.build(), args, train_dataset=runs.examples(8, 1))
        self.trainer.train()

    def go_on(self) -> None:
        self.trainer.train()
        self.trainer.save_model(self.folder)


class Start:
    """Nothing is there yet; then a model is put under an engine."""

    def __init__(self, stage: int, folder: str) -> None:
        self.stage, self.folder = stage, folder
        # The timeout of the process group counts where there is no configuration.
        dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=DESYNC_S))
        self.accelerator = Accelerator(cpu=True)
        hf_zero.ZeroPlugin(config(stage)).attach(self.accelerator)

    def go_on(self) -> None:
        optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
        model = nn.Sequential(nn.Linear(3, 3))  # another one than is given to the call
        engine = hf_zero.initialize(model=model, config=config(self.stage, optimizer=optimizer))[0]
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        engine.full_state_dict(keep=False)

    def build_in(self, block: Any) -> None:
        with block:
            build()

    @property
    def layers(self) -> list[LayerSpec]:
        return [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]


def enter(block: Any) -> None:
    with block:
        pass


Act = Callable[[Any], object]


def schedule_free(optimizer: ShardedOptimizer) -> ShardedOptimizer:
    """Let the optimizer have weights for training that are none for evaluation."""
    optimizer.optimizer.train = lambda: None  # type: ignore[attr-defined]
    return optimizer


CALLS: dict[str, tuple[type, Act]] = {
    # ------------------------------------------------ reads and writes
    "gathered_params": (Loop, lambda p: enter(hf_zero.gathered_params(p.model))),
    "GatheredParameters": (Loop, lambda p: enter(hf_zero.zero.GatheredParameters([p.weight], modifier_rank=0))),
    "unwrap_model_for_generation": (Loop, lambda p: enter(hf_zero.zero.unwrap_model_for_generation(p.model))),
    "TiledLinear": (Loop, lambda p: hf_zero.zero.TiledLinear(6, 6, init_linear=p.model.first)),
    "TiledLinear.copy_params_from": (
        Loop,
        lambda p: hf_zero.zero.TiledLinear(6, 6, out_splits=2).copy_params_from(p.model.first),
    ),
    "full_param": (Loop, lambda p: hf_zero.full_param(p.weight)),
    "full_grad": (Loop, lambda p: hf_zero.full_grad(p.weight)),
    "full_optimizer_state": (Loop, lambda p: hf_zero.full_optimizer_state(p.weight, "exp_avg")),
    "set_full_param": (Loop, lambda p: hf_zero.set_full_param(p.weight, torch.ones(6, 6))),
    "set_full_grad": (Loop, lambda p: hf_zero.set_full_grad(p.weight, torch.ones(6, 6))),
    "set_full_optimizer_state": (
        Loop,
        lambda p: hf_zero.set_full_optimizer_state(p.weight, "exp_avg", torch.ones(6, 6)),
    ),
    "local_grad": (Loop, lambda p: hf_zero.local_grad(p.weight)),
    "set_local_param": (Loop, lambda p: hf_zero.set_local_param(p.weight, p.piece)),
    "set_local_grad": (Loop, lambda p: hf_zero.set_local_grad(p.weight, p.piece)),
    "set_local_optimizer_state": (Loop, lambda p: hf_zero.set_local_optimizer_state(p.weight, "exp_avg", p.piece)),
    "update_full_grads": (Loop, lambda p: hf_zero.update_full_grads(p.model, lambda grad, param: grad)),
    "copy_weights": (Loop, lambda p: hf_zero.copy_weights(p.model, p.other)),
    "ShardedEMA": (Loop, lambda p: hf_zero.ShardedEMA(p.model, name="another")),
    "ShardedEMA.update": (Loop, lambda p: p.ema.update()),
    "ShardedEMA.swapped": (Loop, lambda p: enter(p.ema.swapped())),
    "ShardedEMA.full_state_dict": (Loop, lambda p: p.ema.full_state_dict(keep=False)),
    "ShardedEMA.load_checkpoint": (Loop, lambda p: p.ema.load_checkpoint(p.folder, "saved")),
    "ShardedEMA.close": (Loop, lambda p: p.ema.close()),
    "load_fp32_into": (Loop, lambda p: hf_zero.load_fp32_into(p.model, p.folder + "/saved")),
    "load_state_dict_from_zero_checkpoint": (
        Loop,
        lambda p: hf_zero.load_state_dict_from_zero_checkpoint(p.model, p.folder + "/saved"),
    ),
    # ------------------------------------------------ the engine
    "ZeroEngine.backward": (Loop, lambda p: p.backward()),
    "ZeroEngine.step": (Windows, lambda p: p.engine.step()),
    "ZeroEngine.zero_grad": (Windows, lambda p: p.engine.zero_grad()),
    "ShardedOptimizer.zero_grad": (Windows, lambda p: p.optimizer.zero_grad()),
    "ZeroEngine.clip_grad_norm_": (Loop, lambda p: p.engine.clip_grad_norm_(0.1)),
    "ZeroEngine.finish_updates": (Loop, lambda p: p.engine.finish_updates()),
    "ZeroEngine.finish_saves": (Loop, lambda p: p.engine.finish_saves()),
    "ZeroEngine.full_state_dict": (Loop, lambda p: p.engine.full_state_dict(keep=True)),
    "ZeroEngine.weights_for_ranks": (Loop, lambda p: p.engine.weights_for_ranks([set(p.full)])),
    "ZeroEngine.load_full_state_dict": (Loop, lambda p: p.engine.load_full_state_dict(p.full)),
    "ZeroEngine.load_state_dict": (Loop, lambda p: p.engine.load_state_dict(p.full)),
    "ZeroEngine.save_checkpoint": (Loop, lambda p: p.engine.save_checkpoint(p.folder)),
    "ZeroEngine.write_checkpoint": (Loop, lambda p: p.engine.write_checkpoint(p.folder + "/one")),
    "ZeroEngine.load_checkpoint": (Loop, lambda p: p.engine.load_checkpoint(p.folder)),
    "ZeroEngine.read_checkpoint": (Loop, lambda p: p.engine.read_checkpoint(p.folder + "/saved")),
    "ZeroEngine.teardown": (Loop, lambda p: p.engine.teardown()),
    "ZeroEngine.uninstall": (Loop, lambda p: p.engine.uninstall()),
    "DeepSpeedNames.set_train_batch_size": (Windows, lambda p: set_train_batch_size(p)),
    "DeepSpeedNames.set_gradient_accumulation_boundary": (
        Windows,
        lambda p: p.engine.set_gradient_accumulation_boundary(True),
    ),
    "DeepSpeedNames.allreduce_gradients": (Loop, lambda p: p.engine.allreduce_gradients()),
    "DeepSpeedNames.coalesce_grad_reduction": (Loop, lambda p: enter(p.engine.coalesce_grad_reduction())),
    "ShardedOptimizer.reduce_gradients": (Loop, lambda p: p.optimizer.reduce_gradients()),
    "DeepSpeedNames.set_lr": (Loop, lambda p: p.engine.set_lr(0.5)),
    "DeepSpeedNames.module_state_dict": (Loop, lambda p: p.engine.module_state_dict()),
    "DeepSpeedNames.save_16bit_model": (Loop, lambda p: p.engine.save_16bit_model(p.folder)),
    "DeepSpeedNames.empty_partition_cache": (Loop, lambda p: p.engine.empty_partition_cache()),
    "ZeroEngine.offload_states": (Loop, lambda p: p.engine.offload_states()),
    "DeepSpeedNames.destroy": (Loop, lambda p: p.engine.destroy()),
    "ShardedOptimizer.train": (Loop, lambda p: schedule_free(p.optimizer).train()),
    "ShardedOptimizer.step": (Loop, lambda p: p.optimizer.step()),
    "ShardedOptimizer.clip_grad_norm": (Loop, lambda p: p.optimizer.clip_grad_norm(0.1)),
    "ShardedOptimizer.add_param_group": (
        Loop,
        lambda p: p.optimizer.add_param_group({"params": list(p.model.late.parameters())}),
    ),
    "ShardedOptimizer.finish_updates": (Loop, lambda p: p.optimizer.finish_updates()),
    "ShardedOptimizer.set_grad": (Loop, lambda p: p.optimizer.set_grad(p.place, p.piece)),
    "ShardedOptimizer.set_state": (
        Loop,
        lambda p: p.optimizer.set_state(p.place, "exp_avg", p.piece, number=False),
    ),
    "ShardedOptimizer.take_in": (Loop, lambda p: p.optimizer.take_in([])),
    "log_summary": (Loop, lambda p: hf_zero.comm.log_summary(show_straggler=True)),
    # ------------------------------------------------ accelerate, transformers
    "ZeroAcceleratedOptimizer.step": (Accelerated, lambda p: p.optimizer.step()),
    "ZeroAcceleratedOptimizer.clip_grad_norm_": (Accelerated, lambda p: p.optimizer.clip_grad_norm_(0.1)),
    "ZeroAcceleratorMixin.clip_grad_norm_": (
        Accelerated,
        lambda p: p.accelerator.clip_grad_norm_(p.model.parameters(), 0.1),
    ),
    "ZeroAcceleratorMixin.prepare_model": (Start, lambda p: p.accelerator.prepare_model(build())),
    "AcceleratorState.get_state_dict": (Accelerated, lambda p: p.accelerator.get_state_dict(p.model)),
    "AcceleratorState.save_state": (Accelerated, lambda p: p.accelerator.save_state(p.folder)),
    "AcceleratorState.load_state": (Accelerated, lambda p: p.accelerator.load_state(p.folder)),
    "ZeroPlugin.create_engine": (
        Start,
        lambda p: p.accelerator.zero_plugin.create_engine(p.accelerator, build(), train=True),
    ),
    "_Saving.save_pretrained": (Llama, lambda p: p.model.save_pretrained(p.folder)),
    "_Saving.push_to_hub": (Llama, lambda p: p.model.push_to_hub("a/b")),
    "_Calls.generate": (Llama, lambda p: p.model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=3)),
    "Trainer.train": (Training, lambda p: p.trainer.train()),
    "Trainer.save_model": (Training, lambda p: p.trainer.save_model(p.folder)),
    # ------------------------------------------------ before there is an engine
    "initialize": (Start, lambda p: hf_zero.initialize(model=build(), config=config(p.stage))),
    "shard": (Start, lambda p: hf_zero.shard(build(), config(p.stage))),
    "ZeroEngine": (
        Start,
        lambda p: hf_zero.ZeroEngine(build(), hf_zero.ZeroConfig.load(config(p.stage)).resolve(world_size=2)),
    ),
    "sharded_init": (Start, lambda p: p.build_in(hf_zero.sharded_init(config(3)))),
    "Init": (Start, lambda p: p.build_in(hf_zero.zero.Init(config_dict_or_path=config(3)))),
    # ------------------------------------------------ pipelines
    "PipelineModule": (Start, lambda p: PipelineModule(p.layers, num_stages=2)),
    "PipelineModule.build": (Start, lambda p: PipelineModule(p.layers).build(2)),
    "PipelineModule.configure": (Start, lambda p: PipelineModule(p.layers).configure(PipelineSection(stages=2))),
    "PipelineEngine": (Pipeline, lambda p: hf_zero.initialize(model=p.module, config=config(0))),
    "PipelineEngine.train_batch": (Pipeline, lambda p: p.engine.train_batch(p.batches())),
    "PipelineEngine.eval_batch": (Pipeline, lambda p: p.engine.eval_batch(p.batches())),
    "PipelineEngine.full_state_dict": (Pipeline, lambda p: p.engine.full_state_dict(keep=True)),
    "PipelineEngine.read_checkpoint": (Pipeline, lambda p: p.engine.read_checkpoint(p.folder + "/saved")),
    "PipelineEngine.load_checkpoint": (Pipeline, lambda p: p.engine.load_checkpoint(p.folder)),
    "PipelineEngine.load_full_state_dict": (Pipeline, lambda p: p.engine.load_full_state_dict(p.full)),
    "PipelineEngine.schedule_report": (Pipeline, lambda p: p.engine.schedule_report()),
}


# One of each kind is tried at every change, all of them at night.
PER_CHANGE = """gathered_params set_local_grad ShardedEMA.update ZeroEngine.backward ZeroEngine.step
    ZeroEngine.zero_grad ZeroEngine.full_state_dict ZeroEngine.save_checkpoint ZeroEngine.load_checkpoint
    DeepSpeedNames.set_lr ShardedOptimizer.step ZeroAcceleratedOptimizer.step AcceleratorState.save_state
    _Saving.save_pretrained _Calls.generate Trainer.train initialize sharded_init PipelineModule
    PipelineEngine.train_batch""".split()
# Each rank does these by itself: below stage 3 no gather finds it out.
BY_ITSELF = """ShardedEMA ShardedEMA.update ShardedEMA.close ZeroEngine.backward ZeroEngine.step ZeroEngine.zero_grad
    ZeroEngine.finish_updates ZeroEngine.finish_saves ZeroEngine.load_full_state_dict ShardedOptimizer.zero_grad
    ShardedOptimizer.add_param_group DeepSpeedNames.set_train_batch_size DeepSpeedNames.set_lr
    DeepSpeedNames.set_gradient_accumulation_boundary DeepSpeedNames.empty_partition_cache
    ZeroEngine.offload_states PipelineEngine.load_full_state_dict""".split()
# Ranks compare what they did, and the error says what that was, by rank.
COMPARED = {"ZeroEngine.zero_grad", "ShardedOptimizer.zero_grad", "ZeroEngine.uninstall"}


def stop_or_give_up(how: str) -> None:
    """Rank 0 does not come to a save, because its engine has met an error before."""
    engine = hf_zero.initialize(model=build(), config=config(1))[0]
    dist.barrier()
    if engine.rank == 0:
        if how == "gave up":
            with pytest.raises(hf_zero.StateError):
                hf_zero.full_param(engine.module.first.weight)
        elif how == "disk full":
            engine.comm.abandon(hf_zero.OffloadError("rank 0: no space left"))
        else:
            engine.comm.disconnect()
    dist.barrier()
    if engine.rank == 1:
        engine.save_checkpoint("nowhere")
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("gave up", "StateError", f"Rank 0 had called full_param before, and given up: {__file__}:"),
        ("disk full", "OffloadError", "rank 0: no space left"),
        ("stopped", "DivergenceError", "rank(s) [0] have ended, or closed their connections after an error"),
    ],
)
def test_who_waits_is_told_why_another_rank_does_not_come(how: str, kind: str, said: str) -> None:
    failure = run_ranks(stop_or_give_up, 2, how, expect_error=True, timeouts={"presence": 1})[1]
    assert failure.kind == kind and said in failure.message, failure.traceback
    assert f"Called from: {__file__}:" in failure.message


def join_alone() -> float:
    began = time.monotonic()
    if os.environ["RANK"] == "0":
        with pytest.raises(dist.DistError, match="1/2 clients joined"):
            hf_zero.init_distributed(timeout=datetime.timedelta(seconds=2))
    return time.monotonic() - began


def test_processes_are_joined_on_one_rank_only() -> None:
    assert max(run_ranks(join_alone, 2, init_group=False)) < SOON_S


def set_train_batch_size(program: Windows) -> None:
    program.engine.zero_grad()
    program.engine.schedule.restart_at(0, 0)
    program.engine.set_train_batch_size(4)


def on_rank_0(name: str, stage: int, folder: str) -> None:
    kind, act = CALLS[name]
    program = kind(stage, folder)
    dist.barrier()
    began = time.monotonic()
    try:
        if dist.get_rank() == 0:
            act(program)
        program.go_on()
    finally:
        print(f"{time.monotonic() - began:.1f} s", flush=True)
        assert time.monotonic() - began < SOON_S


def test_every_documented_call_is_tried() -> None:
    found = documented()
    assert len(found) > 50
    assert found.keys() - OTHERWISE <= CALLS.keys(), "say in CALLS how it is called"


EACH = [*((name, 3) for name in CALLS), *((name, 1) for name in BY_ITSELF)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    [pytest.param(*one, marks=[] if one[0] in PER_CHANGE else pytest.mark.nightly) for one in EACH],
)
def test_a_call_on_one_rank_only_raises_on_all(name: str, stage: int, tmp_path: Path) -> None:
    outcomes = run_ranks(on_rank_0, 2, name, stage, str(tmp_path), expect_error=True, timeouts={"presence": 1})
    for rank, failure in enumerate(outcomes):
        assert failure is not None, f"rank {rank} went on as if nothing were wrong: {outcomes}"
        assert isinstance(failure.exception, hf_zero.StateError | hf_zero.DivergenceError), failure.traceback
        assert name in COMPARED or f"Called from: {__file__}:" in failure.message, failure.message
