"""Names of DeepSpeed that programs import beside the engine: loaders, timers, options, partitions, layers."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.extras.deepspeed import optimizer as optimizer_names
from hf_zero.extras.deepspeed import parameters as parameter_names
from hf_zero.extras.deepspeed.zero import Init, ZeroParamStatus
from hf_zero.optim.schedule_types import TYPES
from tests.harness.ranks import run_ranks


def room(path: str) -> Any:
    return importlib.import_module(f"hf_zero.{path}")


class Clock:
    """A clock that is moved by hand."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def is_past(self, mark: float) -> bool:
        return True

    def ms(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("hf_zero.extras.deepspeed.timer.clock_of", lambda _: made)
    return made


# -------------------------------------------------------------------- data
def loaded() -> tuple[list[int], int]:
    loader = room("runtime.dataloader").DeepSpeedDataLoader
    started = []
    timer = SimpleNamespace(start=lambda: started.append(1))
    mine = loader(list(range(8)), 2, False, 0, timer, num_local_io_workers=0, dataloader_drop_last=True)
    assert all(len(batch) == 2 for batch in mine) and len(mine) == 2
    return [int(one) for batch in mine for one in batch], len(started)


def test_a_loader_has_this_ranks_share() -> None:
    outcomes = run_ranks(loaded, 2)
    assert sorted(outcomes[0][0] + outcomes[1][0]) == list(range(8))
    assert [started for _, started in outcomes] == [4, 4]  # two passes of two batches


def test_a_loader_of_one_process_has_all_data() -> None:
    loader = room("runtime.dataloader").DeepSpeedDataLoader
    whole = loader(list(range(8)), 4, False, -1, None, num_local_io_workers=0)
    assert sorted(int(one) for batch in whole for one in batch) == list(range(8))
    with pytest.raises(NotImplementedError, match=r"runtime\.data_pipeline: use a sampler"):
        loader([1], 1, False, -1, None, deepspeed_dataloader_config={"curriculum_learning": True})


def loaded_by_engine() -> tuple[list[int], ...]:
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam"}}
    engine, _, loader, _ = hf_zero.initialize(model=nn.Linear(2, 1), config=config, training_data=list(range(8)))
    loaders = (loader, engine.deepspeed_io(list(range(8)), 4, route="eval"))
    return tuple([number for batch in one for number in batch.tolist()] for one in loaders)


def test_an_engine_makes_loaders() -> None:
    (trained, first), (also_trained, second) = run_ranks(loaded_by_engine, 2)
    assert sorted(trained + also_trained) == list(range(8)) and trained != [0, 2, 4, 6]  # it is shuffled
    assert (first, second) == ([0, 2, 4, 6], [1, 3, 5, 7])


# -------------------------------------------------------------------- numbers, checkpoints, pieces
def monitored(folder: str) -> bool:
    """Write a number of the program's own, as each rank of it does."""
    config = {"train_batch_size": 2, "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"}}
    monitors = room("runtime.config").DeepSpeedConfig(config).monitor_config
    assert room("monitor.csv_monitor").csvMonitor(monitors.csv_monitor).job_name == "run"
    master = room("monitor.monitor").MonitorMaster(monitors)
    for samples in (2, 4):
        master.write_events([("Eval/loss", torch.tensor(0.5 * samples), samples)])
    return bool(master.enabled)


def test_a_program_has_monitors_for_its_own_numbers(tmp_path: Path) -> None:
    assert run_ranks(monitored, 2, str(tmp_path), as_deepspeed=True) == [True, True]
    assert (tmp_path / "run" / "Eval_loss.csv").read_text().splitlines() == ["step,loss", "2,1.0", "4,2.0"]
    default = room("monitor.config").DeepSpeedMonitorConfig()
    assert not default.enabled and default.wandb.project == "deepspeed"


def linear(stage: int) -> Any:
    torch.manual_seed(0)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_batch_size": 4, "optimizer": {"type": "Adam"}, "zero_optimization": zero}
    engine = hf_zero.initialize(model=nn.Linear(3, 1), config=config)[0]
    engine.backward(engine(torch.ones(1, 3)).mean())
    return engine


def saved(folder: str) -> tuple[torch.Tensor, list[int]]:
    engine = linear(3)
    pieces = [room("utils").safe_get_local_grad(param) for param in engine.parameters()]
    engine.step()
    engine.save_checkpoint(folder, tag="step")
    if engine.rank == 0:
        options = SimpleNamespace(input_folder=f"{folder}/step", output_folder=f"{folder}/step_universal")
        room("checkpoint.ds_to_universal").main(options)
        with pytest.raises(hf_zero.CheckpointError, match="step_universal exists: name a new folder"):
            room("checkpoint.ds_to_universal").main(options)
    return room("utils").safe_get_full_fp32_param(engine.weight), [len(one) for one in pieces]


def test_a_universal_checkpoint_loads_at_another_stage(tmp_path: Path) -> None:
    weights, numels = zip(*run_ranks(saved, 4, str(tmp_path)), strict=True)
    # Each of the four ranks has one of the four numbers, and so no element of the weight, or of the bias.
    assert [sum(column) for column in zip(*numels, strict=True)] == [3, 1] and 0 in numels[0]
    engine = linear(2)
    assert not torch.equal(engine.weight, weights[0])
    engine.load_checkpoint(tmp_path, tag="step_universal")
    assert torch.equal(engine.weight, weights[0])


def test_frozen_parameters_have_no_local_values() -> None:
    model = nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    hf_zero.initialize(model=model, config=config)
    local = room("utils").safe_get_local_fp32_param
    assert local(model.bias) is None and local(model.weight).shape == (3,)


# -------------------------------------------------------------------- time
def test_timers_by_name(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    timers = room("utils.timer").SynchronizedWallClockTimer()
    for _ in range(2):
        timers("forward").start()
        clock.now += 3
        timers("forward").stop()
    assert timers("forward").elapsed(reset=False) == 6
    timers("forward").start()
    clock.now += 4
    assert timers("forward").elapsed() == 10  # and it goes on
    clock.now += 1
    timers("forward").stop()
    timers.log(["forward", "nothing"], normalizer=2)
    timers.log(["forward"], ranks=[1])
    assert "time (ms) | forward: 0.50" in caplog.text and caplog.text.count("forward") == 1
    assert timers("forward").elapsed() == 0 and list(timers.get_timers()) == ["forward"]
    timers("forward").start()
    clock.now += 4
    timers("forward").reset()
    assert timers("forward").elapsed() == 0


def test_samples_per_second(clock: Clock) -> None:
    lines: list[str] = []
    config = SimpleNamespace(enabled=True)
    timer = room("utils.timer").ThroughputTimer(config, 10, start_step=1, steps_per_output=3, logging_fn=lines.append)
    assert timer.avg_samples_per_sec() == float("-inf")
    for ms in (500, 100, 300):
        for micro in range(2):
            timer.start()
            clock.now += ms / 2
            timer.stop(global_step=micro == 1)
            clock.now += 77  # between stop and start, which does not count
    timer.update_epoch_count()
    assert timer.avg_samples_per_sec() == pytest.approx(10 * 2 / 0.4) and timer.micro_step_count == 0
    assert len(lines) == 1 and "micro_step=6/global_step=3, RunningAvgSamplesPerSec=50.0" in lines[0]
    config.enabled = False
    timer.start()
    clock.now += 100
    timer.stop(global_step=True)
    assert timer.global_step_count == 3


def test_the_timer_of_an_engine_counts_epochs_and_samples() -> None:
    engine = hf_zero.initialize(
        model=nn.Linear(2, 1), config={"train_batch_size": 4, "steps_per_print": 10, "optimizer": {"type": "Adam"}}
    )[0]
    assert engine.tput_timer.avg_samples_per_sec() == float("-inf")
    for _ in range(4):
        engine.backward(engine(torch.ones(4, 2)).mean())
        engine.step()
    assert engine.tput_timer.avg_samples_per_sec() > 0
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("ops.adam.cpu_adam", "DeepSpeedCPUAdam"),
        ("ops.adam.fused_adam", "FusedAdam"),
        ("ops.adagrad.cpu_adagrad", "DeepSpeedCPUAdagrad"),
        ("ops.lamb.fused_lamb", "FusedLamb"),
        ("ops.lion.cpu_lion", "DeepSpeedCPULion"),
        ("ops.lion.fused_lion", "FusedLion"),
        ("comm.comm", "init_distributed is_initialized all_reduce"),
        ("utils.tensor_fragment", "safe_get_full_grad safe_set_full_fp32_param safe_get_local_grad"),
    ],
)
def test_names_by_the_files_that_deepspeed_keeps_them_in(path: str, names: str) -> None:
    """Programs import from these files too."""
    for name in names.split():
        assert getattr(room(path), name) is getattr(room(path.rpartition(".")[0]), name)


def test_constants_and_versions() -> None:
    schedules = room("runtime.lr_schedules")
    for name in schedules.__all__:
        value = getattr(schedules, name)
        if name.isupper() and name.lower() == value:
            assert name in ("LR_SCHEDULE", "TOTAL_NUM_STEPS") or value in schedule_parameters()
    assert (schedules.WARMUP_MAX_LR, schedules.ONE_CYCLE) == ("warmup_max_lr", "OneCycle")
    named = [getattr(schedules, name) for name in "LR_RANGE_TEST WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR".split()]
    assert {*named, schedules.ONE_CYCLE} == set(schedules.VALID_LR_SCHEDULES)
    ops, builders = room("ops"), room("ops.op_builder")
    assert ops.__compatible_ops__[builders.CPUAdamBuilder.NAME] is ops.__compatible_ops__["async_io"] is True
    assert room("git_version_info").torch_info["version"] == ".".join(torch.__version__.split(".")[:2])
    assert room("runtime.swap_tensor").MIN_SWAPPABLE_BYTES == 1 << 20
    assert issubclass(hf_zero.ConfigError, room("runtime.zero.utils").ZeRORuntimeException)
    newer = room("utils.torch").required_torch_version
    assert newer(min_version=2.1) and not newer(min_version="99.0") and not newer(max_version=2.1)
    made = room("accelerator").get_accelerator().HalfTensor([1, 2])
    assert made.dtype == torch.float16 and made.tolist() == [1.0, 2.0]
    assert room("accelerator").get_accelerator().random() is torch.random
    assert room("zero").MiCS_Init is room("zero").Init
    with pytest.raises(AttributeError, match="has no TensorOfNothing"):
        room("accelerator").get_accelerator().TensorOfNothing  # noqa: B018


def schedule_parameters() -> set[str]:
    return {name for kind in TYPES.values() for name in kind.params}


def test_the_block_of_zero_by_itself() -> None:
    names = room("runtime.zero.config")
    block = names.DeepSpeedZeroConfig(stage=3, cpu_offload_param=True, stage3_prefetch_bucket_size=12345)
    assert block.stage == names.ZeroStageEnum.weights == names.ZeroStageEnum.max_stage
    assert block.prefetch_bucket_size == block.stage3_prefetch_bucket_size == 12345
    assert isinstance(block.offload_param, names.DeepSpeedZeroOffloadParamConfig)
    assert block.offload_param.device == "cpu" and block.offload_optimizer is None
    assert names.DeepSpeedZeroConfig(offload_optimizer={}).offload_optimizer.device == "none"
    assert not hasattr(block, "prefetch") and block.reduce_scatter
    with pytest.raises(ValueError, match="reduce_bucket_size"):
        names.DeepSpeedZeroConfig(reduce_bucket_size=0)


def test_names_of_optimizers() -> None:
    names = room("runtime.config")
    for given, wanted in (("Lamb", names.LAMB_OPTIMIZER), ("adam", names.ADAM_OPTIMIZER), ("SGD", "SGD")):
        block = {"type": given, "params": {"lr": 0.1}}
        engine = hf_zero.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1, "optimizer": block})[0]
        assert engine.optimizer_name() == wanted


def test_submodules_by_their_names() -> None:
    helper, model = room("compression.helper"), nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert helper.recursive_getattr(model, "0.0") is model[0][0]
    helper.recursive_setattr(model, "0.0", nn.ReLU())
    assert isinstance(model[0][0], nn.ReLU)
    with pytest.raises(NotImplementedError, match="torchao"):
        _ = room("compression").init_compression


def test_a_function_is_a_range_in_a_profile() -> None:
    def doubled(value: int) -> int:
        return 2 * value

    with torch.profiler.profile() as profile:
        assert room("utils").instrument_w_nvtx(doubled)(3) == 6
    assert any("doubled" in event.key for event in profile.key_averages())


# -------------------------------------------------------------------- options
def test_options_of_a_schedule() -> None:
    schedules = room("runtime.lr_schedules")
    parser = schedules.add_tuning_arguments(argparse.ArgumentParser())
    given = "--lr_schedule OneCycle --cycle_min_lr 0.1 --cycle_max_lr 0.5 --cycle_first_step_size 4".split()
    block, wrong = schedules.get_config_from_args(parser.parse_args(given))
    assert wrong is None and block["params"]["decay_step_size"] == 1000
    assert "cycle_second_step_size" not in block["params"]  # the first one's
    model = nn.Linear(3, 2)
    engine, _, _, _ = hf_zero.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "scheduler": block,
        },
    )
    rates = []
    for _ in range(8):
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        rates += engine.get_lr()
    assert max(rates) == rates[3] == pytest.approx(0.5) and rates[7] == pytest.approx(0.1)
    params: dict[str, Any] = {"cycle_max_lr": 1.0, "warmup_num_steps": 7}
    schedules.override_1cycle_params(parser.parse_args(["--cycle_max_lr", "0.5"]), params)
    assert (params["cycle_max_lr"], params["warmup_num_steps"]) == (0.5, 7)
    schedules.override_params(parser.parse_args([]), params)
    assert params["warmup_num_steps"] == 1000
    assert schedules.get_lr_from_config(block) == (0.5, "")
    for given, said in ({"type": "Sine", "params": {}}, "Sine is not"), ({"params": {}}, "type not defined"):
        assert schedules.get_lr_from_config(given)[0] is None and said in schedules.get_lr_from_config(given)[1]
    for given, said in (([], "not specified"), (["--lr_schedule", "Sine"], "Sine is not supported")):
        block, wrong = schedules.get_config_from_args(parser.parse_args(given))
        assert block is None and said in wrong


# -------------------------------------------------------------------- layers
class ReturnsBias(nn.Linear):
    """A linear layer as Megatron's: the bias is for the caller to add."""

    def forward(self, given: torch.Tensor) -> Any:
        return nn.functional.linear(given, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_tiles_that_return_their_bias(bias: bool) -> None:
    plain = nn.Linear(7, 5, bias=bias)
    tiled = room("zero").TiledLinearReturnBias(
        7, 5, bias=bias, in_splits=3, out_splits=2, linear_cls=ReturnsBias, init_linear=plain
    )
    given = torch.randn(2, 7)
    output, added = tiled(given)
    torch.testing.assert_close(output, given @ plain.weight.T)
    assert torch.equal(added, plain.bias) if bias else added is None


def test_parts_of_a_row_of_layers() -> None:
    utils = room("runtime.utils")
    assert utils.prefix_sum_inc([3, 4, 5]) == [3, 7, 12]
    assert utils.call_to_str("Layer", 3, "gelu", bias=False) == "Layer(3, 'gelu', bias=False)"
    assert utils.partition_uniform(7, 3) == [0, 3, 5, 7] and utils.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert utils.partition_balanced([1, 2, 5, 1], 2) == [0, 2, 4]
    assert utils.partition_balanced([3, 4], 3) == [0, 1, 2, 2]


def test_flat_copies() -> None:
    utils = room("ops.op_builder").UtilsBuilder().load()
    parts = [torch.rand(2, 3), torch.rand(4)]
    flat = utils.flatten(parts)
    assert flat.shape == (10,)
    assert all(torch.equal(*pair) for pair in zip(utils.unflatten(flat, parts), parts, strict=True))


# -------------------------------------------------------------------- ranks
def ranks() -> tuple[Any, ...]:
    comm, groups = room("comm"), room("utils.groups")
    assert comm.has_reduce_scatter_tensor() and comm.has_coalescing_manager()
    assert room("accelerator").is_current_accelerator_supported()
    ranks = comm.get_all_ranks_from_group(groups.get_data_parallel_group())
    return ranks, groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()


def test_ranks_that_share_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(ranks, 2) == [([0, 1], 0, 2), ([0, 1], 1, 2)]
    comm = room("comm")
    for name, value in (
        ("RANK", "5"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "8"),
        ("MASTER_ADDR", "a"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert comm.get_world_rank_from_launcher() == 5 and comm.get_local_rank_from_launcher() == 1
    assert comm.get_world_size_from_launcher() == 8


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def weights(stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train for a step; return the attribute's tensors, and all weights of each group, sorted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    groups = [{"params": list(layer.parameters())} for layer in model]
    engine = hf_zero.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.1),
        config={**config_of(stage), "bf16": {"enabled": True}},
    )[0]
    engine.backward(engine(torch.ones(1, 5, dtype=torch.bfloat16)).sum())
    engine.step()
    other = {1: "fp32_partitioned_groups_flat", 3: "single_partition_of_fp32_groups"}[stage]
    name = {3: "fp32_partitioned_groups_flat", 1: "single_partition_of_fp32_groups"}[stage]
    with pytest.raises(AttributeError, match="is not at stage"):
        optimizer_names.answer(other, engine.optimizer)
    full = [
        torch.cat([hf_zero.full_optimizer_state(one, "master").reshape(-1) for one in layer.parameters()])
        for layer in model
    ]
    return optimizer_names.answer(name, engine.optimizer), full


@pytest.mark.parametrize("stage", [1, 3])
def test_fp32_weights_of_the_param_groups(stage: int) -> None:
    """The ranks' pieces together are the masters, once each, which bf16 cannot hold."""
    outcomes = run_ranks(weights, 2, stage)
    for number, full in enumerate(outcomes[0][1]):
        pieces = torch.cat([mine[number] for mine, _ in outcomes])
        assert pieces.dtype == torch.float32 and not torch.equal(full, full.bfloat16().float())
        assert torch.equal(pieces.sort().values, full.sort().values)


def test_copies_for_a_file_are_tied_where_the_tensors_are() -> None:
    weight = torch.randn(3, 2)
    state = {"embed": weight, "head": weight.detach(), "turned": weight.t(), "rest": [weight[0], 5]}
    copied = room("checkpoint.utils").clone_tensors_for_torch_save(state)
    assert copied["head"] is copied["embed"] and torch.equal(copied["embed"], weight)
    alone = [copied["embed"], copied["turned"], copied["rest"][0]]
    assert len({one.untyped_storage().data_ptr() for one in (weight, *alone)}) == 4
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in alone) and copied["rest"][1] == 5


def test_the_optimizer_moves_states_and_tells_the_loss_scale() -> None:
    model = nn.Linear(5, 3)
    config = {**config_of(2), "fp16": {"enabled": True, "loss_scale": 8}}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    for name in ("offload_states", "reload_states"):
        assert optimizer_names.answer(name, engine.optimizer) == getattr(engine, name)
    names = ("cur_scale", "loss_scale", "dynamic_loss_scale")
    assert [optimizer_names.answer(name, engine.optimizer) for name in names] == [8.0, 8.0, False]
    assert engine.sparse_tensor_module_names == set()
    assert engine.loss_scale() == engine.optimizer.loss_scaler.loss_scale == 8.0
    with pytest.raises(AttributeError):
        optimizer_names.answer("scale_window", engine.optimizer)
    engine.teardown()
    config = {
        **config_of(2),
        "fp16": {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 7, "min_loss_scale": 4},
    }
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    engine.backward(engine(torch.ones(1, 5).half()).sum())
    engine.step()
    dynamic = {
        "dynamic_loss_scale": True,
        "scale_window": 7,
        "min_loss_scale": 4,
        "cur_iter": 1,
        "last_overflow_iter": -1,
    }
    assert {name: optimizer_names.answer(name, engine.optimizer) for name in dynamic} == dynamic
    engine.teardown()


def under_construction() -> None:
    seen: list[tuple[Any, ...]] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4, bias=False))
            self.head = nn.Linear(4, 2, bias=False)
            for weight in (self.inner[0].weight, self.head.weight):
                seen.append(
                    tuple(parameter_names.answer(name, weight) for name in ("ds_shape", "ds_numel", "ds_status"))
                )
            assert parameter_names.answer("ds_tensor", self.inner[0].weight).numel() == 8
            numbers = [parameter_names.answer("ds_id", one) for one in self.parameters()]
            assert numbers == [parameter_names.answer("ds_id", one) for one in self.parameters()]
            assert len(set(numbers)) == 2
            with pytest.raises(AttributeError, match="in no shards yet"):
                parameter_names.answer("ds_tensor", self.head.weight)

    with Init(config_dict_or_path=config_of(3)):
        model = Net()
    assert seen == [((4, 4), 16, ZeroParamStatus.NOT_AVAILABLE), ((2, 4), 8, ZeroParamStatus.AVAILABLE)]
    engine = hf_zero.initialize(model=model, config=config_of(3))[0]
    status = [parameter_names.answer("ds_status", one) for one in engine.module.parameters()]
    assert status == [ZeroParamStatus.NOT_AVAILABLE] * 2
    said = parameter_names.answer("ds_summary", model.head.weight)()
    assert said["ds_shape"] == (2, 4) and said["status"] == "NOT_AVAILABLE"
    assert said["ds_tensor.shape"] == parameter_names.answer("ds_tensor", model.head.weight).shape
    assert said["persist"] is parameter_names.answer("ds_persist", model.head.weight) is False
    is_zero_param = room("runtime.zero.partition_parameters").is_zero_param
    assert all(map(is_zero_param, model.parameters()))
    assert not any(map(is_zero_param, (nn.Parameter(torch.ones(1)), torch.ones(1), None)))
    with pytest.raises(AttributeError, match="is not at stage 3, so it has no ds_id"):
        parameter_names.answer("ds_id", nn.Parameter(torch.ones(1)))


def test_attributes_of_parameters_under_construction() -> None:
    run_ranks(under_construction, 2)
