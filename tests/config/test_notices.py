"""A key that is given and has no effect is said in a line, by `config check` too; what a run alone knows, by the
engine.
"""

from __future__ import annotations

import json
import logging
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.config.conditions import MAX_TILE_NUMEL
from hf_zero.config.notices import run_notices
from hf_zero.errors import ConfigError
from hf_zero.extras.cli.main import main
from hf_zero.extras.deepspeed.zero import _offloaded
from tests.harness.ranks import run_ranks

ZERO = "zero_optimization"
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
CPU = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
DISK = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}


def adam(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": {"lr": 1e-3, **params}}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {ZERO: {"stage": stage, **keys}}


def notices(config: dict[str, Any], **around: Any) -> list[str]:
    return list(ZeroConfig.load(config).resolve(client_optimizer=True, **around).notices)


# A configuration, the key that does nothing in it, a part of the reason, and what gives the key its effect.
SILENT: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
    (zero(2, stage3_prefetch_bucket_size=7), "stage3_prefetch_bucket_size", "stage is 2", zero(3)),
    (zero(1, stage3_max_reuse_distance=7), "stage3_max_reuse_distance", "stage is 1", zero(3)),
    ({"gather_for_generation": "once"}, "gather_for_generation", "stage is 0", zero(3)),
    ({"aio": {"block_size": 4096}}, "aio.block_size", "nothing is on a disk", {ZERO: DISK}),
    ({ZERO: {"offload_optimizer": {"fast_init": True}}}, "fast_init", "not on a disk", {ZERO: DISK}),
    ({ZERO: {"offload_optimizer": {"pipeline_read": False}}}, "pipeline_read", "not on a disk", {ZERO: DISK}),
    (
        {ZERO: {"stage": 3, "offload_param": {"buffer_count": 9}}},
        "buffer_count",
        "not on a disk",
        {ZERO: {"offload_param": {"device": "nvme", "nvme_path": "/x"}}},
    ),
    ({ZERO: {"offload_optimizer": {"pin_memory": False}}}, "pin_memory", "not offloaded", {ZERO: CPU}),
    (
        {ZERO: {"stage": 3, "offload_param": {"pin_memory": False}}},
        "pin_memory",
        "not offloaded",
        {ZERO: {"offload_param": {"device": "cpu"}}},
    ),
    (
        {ZERO: {"offload_optimizer": {"ratio": 1.0, "delayed_update_start": 4}}},
        "delayed_update_start",
        "delayed_update is not on",
        {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "delayed_update": True}}},
    ),
    (zero(3, allgather_partitions=False), "allgather_partitions", "stage is 3", zero(2)),
    ({ZERO: {"reduce_scatter": False}}, "reduce_scatter", "nothing is sharded at stage 0", zero(1)),
    ({"zero_allow_untested_optimizer": True}, "zero_allow_untested_optimizer", "nothing is sharded", zero(1)),
    (
        {ZERO: DISK, "zero_force_ds_cpu_optimizer": False},
        "zero_force_ds_cpu_optimizer",
        "host's memory",
        {ZERO: {"offload_optimizer": {"device": "cpu"}}},
    ),
    (
        {ZERO: {**CPU, "sub_group_size": 1e8}},
        "sub_group_size",
        str(MAX_TILE_NUMEL),
        {ZERO: {"sub_group_size": MAX_TILE_NUMEL}},
    ),
    (
        {ZERO: CPU, "optimizer": adam(fused=True, foreach=False)},
        "fused",
        "native update",
        {"zero_force_ds_cpu_optimizer": False},
    ),
    (
        {ZERO: CPU, "optimizer": adam(foreach=True)},
        "foreach",
        "native update",
        {"optimizer": adam(foreach=True, torch_adam=True)},
    ),
    (
        {"optimizer": adam(bias_correction=False, fused=True)},
        "fused",
        "bias correction",
        {"optimizer": adam(bias_correction=True, fused=True)},
    ),
    (
        {"optimizer": adam(adam_w_mode=False)},
        "adam_w_mode",
        "AdamW always",
        {"optimizer": adam("Adam", adam_w_mode=False)},
    ),
    ({"fp16": {"enabled": True, "hysteresis": 4}}, "fp16.hysteresis", "stage 0", zero(1)),
    (
        {"fp16": {"enabled": True, "loss_scale": 8, "initial_scale_power": 4}},
        "fp16.initial_scale_power",
        "fixed",
        {"fp16": {"loss_scale": 0}},
    ),
    ({"fp16": {"enabled": True, "auto_cast": False}}, "fp16.auto_cast", "always cast", {"fp16": {"auto_cast": True}}),
    ({"fp16": {"loss_scale": 8}}, "fp16.loss_scale", "fp16.enabled is not given", {"fp16": {"enabled": True}}),
    (
        {"csv_monitor": {"job_name": "x"}},
        "csv_monitor.job_name",
        "csv_monitor.enabled is not given",
        {"csv_monitor": {"enabled": True}},
    ),
    (
        {"flops_profiler": {"profile_step": 9}},
        "flops_profiler.profile_step",
        "not given",
        {"flops_profiler": {"enabled": True}},
    ),
    ({"keep_fp32": ["*norm*"]}, "keep_fp32", "no parameter is cast", {"bf16": {"enabled": True}}),
    ({"timers": {"throughput": {"enabled": True}}}, "throughput.enabled", "steps_per_print", {"steps_per_print": 5}),
    (
        {"comms_logger": {"enabled": True, "prof_ops": ["broadcast"]}},
        "comms_logger.prof_ops",
        "prof_all is on",
        {"comms_logger": {"prof_all": False}},
    ),
    (
        {ZERO: DISK, "checkpoint": {"async": True}},
        "checkpoint.async",
        "on the disk",
        {ZERO: {"offload_optimizer": {"device": "cpu"}}},
    ),
    (
        {"activation_checkpointing": {"number_checkpoints": 4}},
        "number_checkpoints",
        "is off",
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True}},
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "decay_lr_rate": 0.5}}},
        "decay_lr_rate",
        "nothing decays",
        {"scheduler": {"params": {"decay_step_size": 5}}},
    ),
    (
        {
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_momentum": False, "cycle_max_mom": 0.5},
            }
        },
        "cycle_max_mom",
        "cycle_momentum is off",
        {"scheduler": {"params": {"cycle_momentum": True}}},
    ),
    ({"compile": {"backend": "inductor"}}, "compile.backend", "torch.compile is applied", {}),
]


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = dict(one)
    for name, value in other.items():
        both[name] = merged(one[name], value) if isinstance(value, dict) and name in one else value
    return both


@pytest.mark.parametrize(("config", "key", "reason", "cure"), SILENT, ids=lambda one: one if type(one) is str else "")
def test_a_key_without_effect_is_named_with_its_reason(
    config: dict[str, Any], key: str, reason: str, cure: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    (line,) = [line for line in notices(config) if f"{key} = " in line]
    assert "no effect: " in line and reason in line.partition("no effect: ")[2]
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config))
    assert main(["config", "check", str(path)]) == 0
    assert f"note: {line}\n" in capsys.readouterr().out
    if cure:
        assert not [line for line in notices(merged(config, cure)) if f"{key} = " in line]


def test_keys_with_one_reason_share_a_line_and_what_auto_will_be_is_no_reason() -> None:
    given = {"max_live_parameters": 5, "max_reuse_distance": 6, "prefetch_bucket_size": "auto"}
    (line,) = notices(zero(2, **{f"stage3_{name}": value for name, value in given.items()}))
    assert line.count("stage3_") == 2 and "have no effect" in line
    # Only the arguments know whether anything is cast.
    open_config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 4}, "keep_fp32": ["x"]}
    outcome = ZeroConfig.load(open_config).alone()
    assert outcome.config is not None and outcome.config.notices == ()
    off = SimpleNamespace(bf16=False, bf16_full_eval=False, fp16=False, fp16_full_eval=False)
    assert "keep_fp32" in "".join(ZeroConfig.load(open_config).resolve(off).notices)


def test_a_block_that_says_it_is_off_needs_no_line() -> None:
    off = {"enabled": False}
    assert notices({"fp16": {**off, "loss_scale": 8}, "csv_monitor": {**off, "job_name": "x"}}) == []


def test_keys_of_a_pipeline_need_one() -> None:
    block = {"schedule": "gpipe", "partition": "uniform", "seed_layers": True, "activation_checkpoint_interval": 1}
    (line,) = notices({"pipeline": block}, model=nn.Linear(2, 2))
    assert "not a hf_zero.PipelineModule" in line and all(f"pipeline.{name} = " in line for name in block)
    assert notices({"pipeline": block}) == [], "not known without the model"
    module = hf_zero.PipelineModule([nn.Linear(2, 2)])
    assert notices({"pipeline": block}, model=module) == []


def test_the_loader_is_ones_own_where_training_data_is_given() -> None:
    config = {"dataloader_drop_last": True}
    assert notices(config) == [] == notices(config, makes_loader=True)
    for around in ({"makes_loader": False}, {"args": SimpleNamespace()}):
        assert "dataloader_drop_last = true has no effect" in "".join(notices(config, **around))


@pytest.mark.parametrize(
    ("block", "facts", "silent"),
    [
        ({"allgather_bucket_size": 4096}, {"@whole_units": True}, "allgather_bucket_size"),
        ({"allgather_bucket_size": 4096}, {"@whole_units": False}, ""),
        ({"reduce_bucket_size": 4096}, {"@whole_units": True}, "reduce_bucket_size"),
        ({"reduce_bucket_size": 4096}, {"@whole_units": False}, ""),
        ({"reduce_bucket_size": 4096, "allgather_bucket_size": 512}, {"@whole_units": False}, "reduce_bucket_size"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}, {"@device": "cpu"}, "pin_memory"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}, {"@device": "cuda"}, ""),
    ],
)
def test_what_the_device_and_the_backend_decide(block: dict[str, Any], facts: dict[str, Any], silent: str) -> None:
    config = ZeroConfig.load({ZERO: block}).resolve()
    assert not config.notices
    lines = run_notices(config, facts)
    assert len(lines) == bool(silent) and silent in "".join(lines)
    wired = ZeroConfig.load({ZERO: block, "communication_data_type": "fp16"}).resolve()
    if silent == "reduce_bucket_size" and facts["@whole_units"]:
        assert not run_notices(wired, facts), "what is copied is bounded"


def start(config: dict[str, Any]) -> list[str]:
    """The warnings of this rank, at a start without data."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero.engine.engine").addHandler(handler)
    for data in (None, TensorDataset(torch.zeros(4, 2))):
        hf_zero.initialize(model=nn.Linear(2, 2), training_data=data, config=config)[0].teardown()
    return found


def test_the_engine_says_it_once_on_one_rank() -> None:
    config = {
        "optimizer": ADAM,
        "dataloader_drop_last": True,
        "pipeline": {"schedule": "gpipe"},
        **zero(
            2,
            reduce_bucket_size=4096,
            allgather_bucket_size=512,
            offload_optimizer={"device": "cpu", "pin_memory": False},
        ),
    }
    first, second = run_ranks(start, 2, config)
    assert second == []
    expected = {"pin_memory": 2, "reduce_bucket_size = 4096": 2, "pipeline.schedule": 2, "drop_last": 1}
    for key, times in expected.items():
        assert len([line for line in first if key in line and "no effect" in line]) == times, (key, first)


class Layers(nn.Sequential):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__(*(nn.Linear(2, 2) for _ in range(3)))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def train_without_regions() -> dict[str, list[str]]:
    """Return the warnings of two steps, by what the model does."""
    found: dict[str, list[str]] = {}
    for kind in (True, False):
        lines = found[f"checkpointed {kind}"] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("hf_zero.extras.activations.active")
        logger.addHandler(handler)
        config = {"optimizer": ADAM, "activation_checkpointing": {"profile": True}, **zero(2)}
        engine = hf_zero.initialize(model=Layers(checkpointed=kind), config=config)[0]
        for grad in (False, True, True):
            with torch.set_grad_enabled(grad):
                loss = engine(torch.ones(1, 2, requires_grad=True)).sum()
            if grad:
                engine.backward(loss)
                engine.step()
        engine.teardown()
        logger.removeHandler(handler)
    return found


def test_a_model_that_checkpoints_nothing_is_told_so_after_its_first_forward() -> None:
    first, second = run_ranks(train_without_regions, 2)
    assert first["checkpointed True"] == [] and not any(second.values())
    (line,) = first["checkpointed False"]
    assert line.startswith("activation_checkpointing has no effect: nothing in the model's forward was checkpointed")


def test_pinning_by_init_needs_the_host(caplog: pytest.LogCaptureFixture) -> None:
    with hf_zero.zero.Init(pin_memory=True, enabled=False):
        pass
    assert "zero.Init(pin_memory=True) has no effect" in caplog.text
    caplog.clear()
    with hf_zero.zero.Init(pin_memory=True, remote_device="cpu", enabled=False):
        pass
    assert not caplog.text
    for pinned in (True, False):
        assert _offloaded(None, pinned).get(f"{ZERO}.offload_param") == {"device": "cpu", "pin_memory": pinned}


def start_with_a_run(section: dict[str, Any]) -> list[str]:
    """The stand-in for wandb, which is not installed, is a module with the script's run in it. a module with the
    script's run in it stands for it.
    """
    stand_in: Any = types.ModuleType("wandb")
    stand_in.run = SimpleNamespace(log=lambda *args, **kwargs: None)
    stand_in.init = lambda **named: stand_in.run
    stand_in.errors = SimpleNamespace(Error=RuntimeError)
    sys.modules["wandb"] = stand_in
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero.extras.monitors.trackers").addHandler(handler)
    config = {"optimizer": ADAM, "wandb": {"enabled": True, **section}}
    hf_zero.initialize(model=nn.Linear(2, 2), config=config)[0].teardown()
    return found


def test_a_run_that_the_script_has_begun_keeps_its_names() -> None:
    assert run_ranks(start_with_a_run, 2, {}) == [[], []]
    (line,), nothing = run_ranks(start_with_a_run, 2, {"project": "x"})
    assert "have no effect: the script has begun a run" in line and nothing == []


# Settings that name the same thing twice


def test_the_weight_decay_of_adam_follows_either_name() -> None:
    def kind(**params: Any) -> str:
        optimizer = ZeroConfig.load({"optimizer": adam("Adam", **params)}).resolve().optimizer
        assert optimizer is not None and "decoupled_weight_decay" not in optimizer["params"]
        return str(optimizer["type"])

    assert kind() == kind(decoupled_weight_decay=True) == kind(adam_w_mode=True) == "AdamW"
    assert kind(decoupled_weight_decay=False) == kind(adam_w_mode=False) == "Adam"
    assert kind(adam_w_mode=False, decoupled_weight_decay=False) == "Adam"
    with pytest.raises(ConfigError, match="decoupled_weight_decay = true: adam_w_mode = false says the opposite"):
        kind(adam_w_mode=False, decoupled_weight_decay=True)


def test_torch_adam_leaves_an_offloaded_update_to_torch() -> None:
    config = {ZERO: CPU, "optimizer": adam(torch_adam=True)}
    assert not ZeroConfig.load(config).resolve().force_native_adam
    assert ZeroConfig.load({ZERO: CPU, "optimizer": adam()}).resolve().force_native_adam
    with pytest.raises(ConfigError, match=r'torch_adam = true: it does not go with .*device = "nvme"'):
        ZeroConfig.load({ZERO: DISK, "optimizer": adam(torch_adam=True)}).resolve()
    delayed = {"stage": 2, "offload_optimizer": {"device": "cpu", "delayed_update": True}}
    with pytest.raises(ConfigError, match="torch_adam = true leaves the update to torch"):
        ZeroConfig.load({ZERO: delayed, "optimizer": adam(torch_adam=True)}).resolve()


def test_o3_scales_by_one_where_apex_does() -> None:
    def scaling(**amp: Any) -> Any:
        return ZeroConfig.load({"amp": {"enabled": True, **amp}}).resolve().precision.scaling

    assert scaling(opt_level="O3").static == 1.0 and scaling(opt_level="O3", loss_scale=8).static == 8.0
    assert scaling(opt_level="O2").static == 0.0 == scaling(opt_level="O3", loss_scale="dynamic").static
    assert "O3 keeps fp32 masters" in "".join(notices({"amp": {"enabled": True, "opt_level": "O3"}}))
