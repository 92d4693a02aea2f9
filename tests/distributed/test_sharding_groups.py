"""Shards in groups of ranks: the numbers of one process, and each element crosses to another group once."""

from __future__ import annotations

import collections
import itertools
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.distributed.rank_groups import group_size
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError
from tests.harness import models
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case
from tests.harness.sharded import Options
from tests.runtime import test_data_dependent
from tests.runtime.test_parity import check

STAGES = (1, 2, 3)
GROUP = "sharding_group"
HYBRID = {"hybrid_shard": True}


def _options(stage: int, size: int | str, **zero: Any) -> Options:
    return Options(stage, zero=((GROUP, size), *zero.items()))


def _offloaded_parameters(device: str, folder: Path) -> dict[str, Any]:
    disk = {"nvme_path": str(folder), "max_in_cpu": 0} if device == "nvme" else {}
    return {"offload_param": {"device": device, **disk}}


# ---------------------------------------------------------------- the numbers of one process
@pytest.mark.parametrize(
    ("world", "sizes", "accumulation"),
    [(4, (1, 2, 4), 2), pytest.param(6, (2, 3), 1, marks=pytest.mark.slow)],
)
def test_parity(world: int, sizes: tuple[int, ...], accumulation: int) -> None:
    case = Case("plain", world, accumulation, steps=3)
    runs = [(case, _options(stage, size)) for size, stage in itertools.product(sizes, STAGES)]
    runs += [(case, _options(stage, size, **HYBRID)) for size, stage in itertools.product(sizes, STAGES)]
    check(runs)


@pytest.mark.parametrize(
    "model",
    [
        "unused_somewhere",  # ranks differ in which parameters have a gradient
        *(pytest.param(model, marks=pytest.mark.slow) for model in ("frozen", "tied+twice", "reentrant")),
    ],
)
def test_parity_of_models(model: str) -> None:
    case = Case(model, 4, 1, steps=3)
    # Buckets that cut parameters, of an odd size; persistent parameters beside sharded ones.
    cut = {"reduce_bucket_size": 97, "stage3_param_persistence_threshold": 20}
    check([(case, _options(stage, 2, **cut, **more)) for stage in (2, 3) for more in ({}, HYBRID)])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_parity_of_offloaded_states(device: str, disk_path: Path) -> None:
    case = Case("plain", 4, 2, steps=3, single=True)
    block = {"device": device, "nvme_path": str(disk_path)}
    check([(case, _options(stage, 2, offload_optimizer=block, **more)) for stage in STAGES for more in ({}, HYBRID)])


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_parity_of_offloaded_parameters(device: str, disk_path: Path) -> None:
    case = Case("plain", 4, 2, steps=3, single=True)
    offload = _offloaded_parameters(device, disk_path)
    keys = [(2, {}), (2, HYBRID), (1, {"offload_optimizer": {"device": "cpu"}})]
    check([(case, _options(3, size, **offload, **more)) for size, more in keys])


@pytest.mark.slow
def test_ranks_that_use_different_layers() -> None:
    for size, zero in ((2, test_data_dependent.PREFETCH), (1, test_data_dependent.NO_PREFETCH)):
        test_data_dependent.check("disjoint experts", 4, 3, 2, {**zero, GROUP: size})


# ---------------------------------------------------------------- what leaves a group
def _count_sent(engine: ZeroEngine, steps: int, accumulation: int) -> dict[bool, list[int]]:
    """Return the bytes that this rank sends for gathers and reduces in each step, by whether they leave its group."""
    sent: dict[bool, list[int]] = collections.defaultdict(list)
    original, own = dist.isend, dist.get_rank() // 2

    def isend(tensor: torch.Tensor, **call: Any) -> Any:
        if tensor.dtype == torch.float32:  # votes are float64
            sent[call["group_dst"] // 2 != own][-1] += tensor.nbytes
        return original(tensor, **call)

    with unittest.mock.patch.object(dist, "isend", isend):
        for step in range(steps):
            for leaves in (False, True):
                sent[leaves].append(0)
            for micro in range(accumulation):
                batch = models.make_batch("plain", seed=step * accumulation + micro, rank=dist.get_rank())
                engine.backward(engine(**batch)["loss"])
                engine.step()
    return sent


def _traffic(stage: int, accumulation: int, size: int | str = 2, **more: Any) -> tuple[int, list[int], list[int]]:
    case = Case("plain", dist.get_world_size(), accumulation, single=True)
    model = case.build()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, GROUP: size, **more},
    }
    engine = hf_zero.initialize(model=model, optimizer=case.make_optimizer(model), config=config)[0]
    sent = _count_sent(engine, 3, accumulation)
    total = sum(flat.layout.padded_numel for unit in engine.units for flat in unit.flats)
    return 4 * total // dist.get_world_size(), sent[True], sent[False]


@pytest.mark.parametrize("more", [{}, HYBRID])
@pytest.mark.parametrize("stage", STAGES)
def test_each_element_crosses_once_in_a_direction(stage: int, more: dict[str, Any]) -> None:
    for part, leaving, _ in run_ranks(_traffic, 4, stage, 1, **more):
        # A part of the gradients, summed over the group, and one of the updated parameters, or of the sums.
        assert leaving[1:] == [2 * part] * 2
        assert leaving[0] in (part, 2 * part)


@pytest.mark.parametrize(
    ("stage", "device", "more"),
    [
        *((stage, "none", {}) for stage in STAGES),
        *((stage, "none", HYBRID) for stage in STAGES),
        (3, "cpu", {}),
        (3, "nvme", {}),
    ],
)
def test_micro_batches_stay_within_the_group_until_the_last(
    stage: int, device: str, more: dict[str, Any], disk_path: Path
) -> None:
    offload = _offloaded_parameters(device, disk_path)
    for part, leaving, staying in run_ranks(_traffic, 4, stage, 3, **offload, **more):
        assert leaving[1:] == [2 * part] * 2
        # A gather sends two parts, as a reduce does. At stage 1 there is one of each; at stage 3 most layers are
        # gathered in forward and in backward.
        assert staying[1] >= {1: 4, 2: 8, 3: 14}[stage] * part


def _on_hosts_of_two(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work` on ranks of which two take themselves for one host."""
    with unittest.mock.patch("hf_zero.distributed.comm.host_name", lambda: str(dist.get_rank() // 2)):
        return work(*args)


@pytest.mark.parametrize("stage", STAGES)
def test_no_host_sends_a_byte_twice_to_another_one_without_groups(stage: int) -> None:
    for part, leaving, _ in run_ranks(_on_hosts_of_two, 4, _traffic, stage, 1, "all"):
        # At stage 3 layers cross for forward and for backward, and the root unit once.
        assert leaving[1:] == [2 * part] * 2 if stage < 3 else 2 * part < leaving[1] < 3 * part


@pytest.mark.parametrize(
    ("world", "size", "parts"),
    # With groups of two hosts a rank sends its place of both groups to the other host, and a part to the other group.
    [(4, 1, 1), (8, 4, 2 + 1), (8, 1, 3)],
)
def test_no_host_sends_a_byte_twice_to_another_one_in_groups_of_any_size(world: int, size: int, parts: int) -> None:
    for part, leaving, _ in run_ranks(_on_hosts_of_two, world, _traffic, 2, 1, size):
        assert leaving[1:] == [2 * parts * part] * 2  # of gradients, and of updated parameters


def _losses(stage: int, size: int | str, hybrid: bool) -> list[float]:
    engine = _start(stage, size, hybrid=hybrid)
    return [_step(engine, number) for number in range(4)]


@pytest.mark.parametrize(
    ("stage", "world", "size", "hybrid"),
    [
        *((stage, 4, "all", False) for stage in STAGES),
        *((stage, 4, 1, True) for stage in STAGES),
        *((3, 8, size, hybrid) for size in (4, 1) for hybrid in (False, True)),
        (3, 6, 3, False),  # a host has ranks of two groups, and another one of one
    ],
)
def test_results_do_not_depend_on_hosts(stage: int, world: int, size: int | str, hybrid: bool) -> None:
    want = run_ranks(_losses, world, stage, size, hybrid)
    for losses, expected in zip(run_ranks(_on_hosts_of_two, world, _losses, stage, size, hybrid), want, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]


# ---------------------------------------------------------------- overflows, files, writes
class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.head = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def _start(stage: int, size: int | str, seed: int = 0, *, hybrid: bool = False, **config: Any) -> ZeroEngine:
    torch.manual_seed(seed)
    model = Net()
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 5,
            GROUP: size,
            "hybrid_shard": hybrid,
        },
        "desync_timeout": 20,
        **config,
    }
    return hf_zero.initialize(model=model, config=whole)[0]


def _step(engine: ZeroEngine, number: int, factor: float = 1.0) -> float:
    x = torch.randn(2, 13, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    loss = engine(x).float().square().mean() * factor
    engine.backward(loss)
    engine.step()
    return loss.item()


def _overflow(stage: int, size: int | str, **more: Any) -> list[float]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 5, GROUP: size, **more}
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = _start(stage, size, fp16=fp16, zero_optimization=zero)
    numbers = [_step(engine, number) for number in range(2)]
    _step(engine, 2, float("inf") if dist.get_rank() == 1 else 1.0)
    return [*numbers, *(_step(engine, number) for number in range(3, 6)), engine.skipped_steps]


def test_an_overflow_on_one_rank_is_left_out_on_all() -> None:
    for stage in (2, 3):
        want = run_ranks(_overflow, 4, stage, "all")
        assert [ranks[-1] for ranks in want] == [1] * 4
        for more in ({}, HYBRID):
            for numbers, wanted in zip(run_ranks(_overflow, 4, stage, 2, **more), want, strict=True):
                assert numbers == pytest.approx(wanted, rel=1e-2)
                assert numbers[-1] == wanted[-1]


def _save(stage: int, size: int | str, hybrid: bool, folder: str) -> list[float]:
    engine = _start(stage, size, hybrid=hybrid)
    for number in range(3):
        _step(engine, number)
    engine.save_checkpoint(folder, "saved")
    return [_step(engine, number) for number in range(3, 6)]


def _resume(stage: int, size: int | str, hybrid: bool, folder: str) -> list[float]:
    engine = _start(stage, size, seed=1, hybrid=hybrid)
    _step(engine, 7)  # what has been gathered is not what the files have
    engine.load_checkpoint(folder, "saved")
    return [_step(engine, number) for number in range(3, 6)]


def test_checkpoints_resume_in_groups_of_another_size(tmp_path: Path) -> None:
    saved = ((3, 2, False), (2, 2, False), (3, "all", False), (3, 2, True))
    resumed = ((3, 1, False), (3, 2, False), (2, "all", False), (1, 2, False), (2, 2, True))
    for number, how in enumerate(saved):
        folder = str(tmp_path / str(number))
        want = run_ranks(_save, 4, *how, folder)
        num_files = len(list(Path(folder, "saved").rglob("rank*")))
        assert num_files == (2 if how[-1] else 4)
        for other in resumed:
            got = run_ranks(_resume, 4, *other, folder)
            assert got == [pytest.approx(numbers, rel=1e-5) for numbers in want], (how, other)


def _taken_over(settings: list[tuple[int | str, bool]]) -> list[float]:
    """Construct a model in shards and give it to engines with other groups, one after the other; return losses."""

    def config_of(size: int | str, hybrid: bool) -> dict[str, Any]:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 5, GROUP: size, "hybrid_shard": hybrid}
        adamw = {"type": "AdamW", "params": {"lr": 1e-2}}
        return {"train_micro_batch_size_per_gpu": 2, "optimizer": adamw, "zero_optimization": zero}

    torch.manual_seed(0)
    with hf_zero.sharded_init(config_of(*settings[0])):
        model = Net()
    losses = []
    for number, setting in enumerate(settings):
        engine = hf_zero.initialize(model=model, config=config_of(*setting))[0]
        losses += [_step(engine, 2 * number), _step(engine, 2 * number + 1)]
    return losses


def test_engines_with_other_groups_take_a_model_over() -> None:
    whole, rows, hybrid = ("all", False), (2, False), (2, True)
    settings = [hybrid, whole, hybrid, rows, (1, False), (1, True), hybrid]
    want = run_ranks(_taken_over, 4, [whole] * len(settings))
    got = run_ranks(_taken_over, 4, settings)
    assert got == [pytest.approx(losses, rel=1e-5) for losses in want]


def _write(size: int | str, **zero: Any) -> list[float]:
    """Return what a forward gives after each of the ways in which weights are written from outside."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 5, GROUP: size, **zero}
    engine, other = _start(3, size, zero_optimization=zero), _start(3, size, seed=5)
    model, x = engine.module, torch.ones(1, 13)
    seen = []

    def look() -> None:
        with torch.no_grad():
            seen.append(engine(x).sum().item())

    look()
    weight = model.layers[1].weight
    hf_zero.set_full_param(model, torch.full((13, 13), 0.1), "layers.1.weight")
    look()
    local = hf_zero.local_param(model, "layers.2.weight")
    hf_zero.set_local_param(model, None if local is None else local.values * 2, "layers.2.weight")
    look()
    with hf_zero.gathered_params(model, write_rank=2), torch.no_grad():
        if engine.rank == 2:
            weight.mul_(3)
    look()
    engine.load_full_state_dict(other.full_state_dict(keep=True))
    look()
    hf_zero.copy_weights(_start(3, "all", seed=6).module, model, tau=0.5)
    look()
    average = hf_zero.ShardedEMA(model, 0.5)
    _step(engine, 0)
    look()
    average.update()
    with average.swapped():
        look()
    look()
    _step(engine, 1)
    look()
    return seen


def test_weights_that_are_written_reach_all_groups(disk_path: Path) -> None:
    want = run_ranks(_write, 4, "all")
    assert len({round(value, 6) for value in want[0]}) == len(want[0]) - 1  # one state is seen twice
    for device, more in (("none", {}), ("nvme", {}), ("none", HYBRID)):
        got = run_ranks(_write, 4, 2, **_offloaded_parameters(device, disk_path), **more)
        assert got == [pytest.approx(numbers, rel=1e-5, abs=1e-6) for numbers in want]


def test_groups_that_have_all_states_share_them_among_fewer_ranks() -> None:
    for stage in STAGES:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 5}
        hybrid, plain = run_ranks(_states, 4, 2, **zero, **HYBRID), run_ranks(_states, 4, "all", **zero)
        assert [rows for _, rows in hybrid] == [0] * 4
        sums = [sum(report["optimizer"] for report, _ in ranks) for ranks in (hybrid, plain)]
        assert sums[0] == pytest.approx(2 * sums[1], rel=0.02)  # there are counts of steps too


def _states(size: int | str, **zero: Any) -> tuple[dict[str, int], int]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 5, GROUP: size, **zero}
    engine = _start(3, size, zero_optimization=zero)
    _step(engine, 0)
    return engine.memory_report(), sum(flat.row_bytes for unit in engine.units for flat in unit.flats)


@pytest.mark.parametrize(("device", "place"), [("none", "device"), ("cpu", "host"), ("nvme", "disk")])
def test_what_a_group_shares_is_in_the_memory_report(device: str, place: str, disk_path: Path) -> None:
    offload = _offloaded_parameters(device, disk_path)
    grouped, plain = run_ranks(_states, 4, 2, **offload), run_ranks(_states, 4, "all", **offload)
    for (report, rows), (without, none) in zip(grouped, plain, strict=True):
        assert none == 0
        assert rows > 0
        assert report["parameters"] == without["parameters"] + rows
        assert report[place] >= without[place] + rows
        assert all(report[other] == without[other] for other in {"device", "host", "disk"} - {place})


def _odd_windows(stage: int, size: int | str, offload: dict[str, Any], more: dict[str, Any]) -> list[float]:
    """Return weights after accumulation windows that end, or lose gradients, where no backward could know it."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 5, GROUP: size, **offload}
    adamw, sgd = {"type": "AdamW", "params": {"lr": 1e-2}}, {"type": "SGD", "params": {"lr": 0.3}}
    optimizer = adamw if "offload_optimizer" in offload else sgd
    engine = _start(stage, size, zero_optimization=zero, gradient_accumulation_steps=2, optimizer=optimizer, **more)
    model, seen, number = engine.module, [], itertools.count()

    def backward(*, last: bool) -> None:
        x = torch.randn(2, 13, generator=torch.Generator().manual_seed(10 * next(number) + engine.rank))
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(engine(x).square().mean())

    def step() -> None:
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        seen.extend(value.sum().item() for value in engine.full_state_dict(keep=True).values())

    backward(last=False)
    backward(last=False)
    step()
    backward(last=False)
    seen.append(hf_zero.full_grad(model, "layers.0.weight").sum().item())
    backward(last=True)
    step()
    backward(last=False)
    model.layers[1].weight.grad = None
    model.head.bias.grad = None
    backward(last=True)
    step()
    backward(last=False)
    engine.zero_grad()
    backward(last=True)
    backward(last=True)
    step()
    return seen


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("offload", "more"),
    [({}, {}), ({"offload_optimizer": {"device": "cpu"}}, {}), ({}, {"prescale_gradients": True})],
    ids=["device", "offloaded", "prescaled"],
)
def test_windows_that_end_unforeseen(stage: int, offload: dict[str, Any], more: dict[str, Any]) -> None:
    want = run_ranks(_odd_windows, 4, stage, "all", offload, more)
    for size, mode in ((1, {}), (2, {}), (2, HYBRID), (1, HYBRID)):
        got = run_ranks(_odd_windows, 4, stage, size, {**offload, **mode}, more)
        assert got == [pytest.approx(numbers, rel=1e-4, abs=1e-5) for numbers in want]


def _evaluations(mode: Callable[[], Any], size: int | str, **zero: Any) -> list[float]:
    """Return outputs of evaluations before a training step and after it, under `mode`, and a weight read there."""
    whole = {"stage": 3, "stage3_param_persistence_threshold": 5, GROUP: size, **zero}
    engine, seen = _start(3, size, zero_optimization=whole), []
    for number in range(2):
        with mode():
            seen.append(engine(torch.ones(2, 13)).sum().item())
        _step(engine, number)
        with mode():
            seen.append(hf_zero.full_param(engine.module.layers[1].weight).sum().item())
    return seen


@pytest.mark.parametrize("zero", [{}, {"zero_quantized_weights": True, "zero_quantized_gradients": True}])
@pytest.mark.parametrize("size", [1, 2])
def test_evaluation_in_inference_mode(size: int, zero: dict[str, bool]) -> None:
    want = run_ranks(_evaluations, 4, torch.no_grad, size, **zero)
    assert run_ranks(_evaluations, 4, torch.inference_mode, size, **zero) == want
    assert len(set(want[0])) == 4


# ---------------------------------------------------------------- bad input
def test_group_sizes() -> None:
    hosts = ["a", "a", "b", "b"]
    assert [group_size(wanted, hosts) for wanted in ("all", "host", 1, 2, 4)] == [4, 2, 1, 2, 4]
    for wanted, names, said in (
        (3, hosts, "1, 2, 4"),
        (8, hosts, "do not form groups of 8"),
        ("host", ["a", "a", "a", "b"], "different numbers of ranks: 3"),
        ("host", ["a", "b", "a", "b"], "not consecutive"),
    ):
        with pytest.raises(ConfigError, match=said):
            group_size(wanted, names)


def _on_uneven_hosts(size: int | str) -> None:
    with unittest.mock.patch("hf_zero.distributed.comm.host_name", lambda: "a" if dist.get_rank() < 3 else "b"):
        _start(3, size)


@pytest.mark.parametrize(("size", "said"), [("host", "different numbers of ranks"), (3, "do not form groups of 3")])
def test_groups_that_do_not_exist_are_refused_on_every_rank(size: int | str, said: str) -> None:
    # The last message between two ranks may be on its way for a second under load, after a third one has ended.
    for failure in run_ranks(_on_uneven_hosts, 4, size, expect_error=True, timeouts={"grace": 5.0}):
        assert failure.kind == "ConfigError"
        assert GROUP in failure.message
        assert said in failure.message


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 0, GROUP: 2}, "the stage is 0"),
        ({"stage": 2, GROUP: 2, "reduce_scatter": False}, "reduce_scatter"),
        ({"stage": 2, GROUP: 2, "allgather_partitions": False}, "allgather_partitions"),
        ({"stage": 3, GROUP: 2, "mics_shard_size": 4}, "mics_shard_size"),
        ({"stage": 3, **HYBRID}, "one group only"),
        ({"stage": 3, GROUP: 2, **HYBRID, "zero_quantized_gradients": True}, "no 8-bit messages"),
        ({"stage": 3, GROUP: 0}, "host"),
        ({"stage": 3, GROUP: "node"}, "host"),
    ],
)
def test_keys_that_contradict(zero: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ZeroConfig.load({"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}).resolve(world_size=4)


@pytest.mark.parametrize(
    ("name", "given", "want"),
    [
        ("mics_shard_size", 2, 2),
        ("mics_shard_size", 1, 1),
        ("mics_shard_size", -1, "all"),
        ("zero_hpz_partition_size", 2, 2),
        ("zero_hpz_partition_size", "1", "all"),
    ],
)
def test_the_names_that_deepspeed_has(name: str, given: int | str, want: int | str) -> None:
    config = {"zero_optimization": {"stage": 3, name: given}, "train_micro_batch_size_per_gpu": 1}
    assert ZeroConfig.load(config).resolve(world_size=4).zero.sharding_group == want
