"""A plan counts the bytes that ranks send in a training, and how long a step takes by them."""

from __future__ import annotations

import dataclasses
import itertools
import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.distributed import comm
from hf_zero.extras.estimate.flops import FlopCounter
from hf_zero.extras.estimate.plan import plan_model
from hf_zero.extras.estimate.pretend import PretendedComm
from hf_zero.extras.estimate.profile import Profile, measure
from hf_zero.extras.estimate.step_time import Speeds, step_time
from hf_zero.extras.estimate.tracker import StorageTracker
from hf_zero.extras.estimate.traffic import Pass, Traffic, TrafficCounter
from tests.estimate.test_estimate_plan import batch, llama
from tests.harness.ranks import run_ranks

PER_HOST, WORLD = 2, 4
HYBRID: dict[str, Any] = {"sharding_group": 2, "hybrid_shard": True}
GROUPS: list[dict[str, Any]] = [{}, {"sharding_group": 2}, {"sharding_group": 1}, HYBRID]
BITS: dict[str, Any] = {"zero_quantized_gradients": True}
JOBS: list[tuple[dict[str, Any], int]] = [
    *(({"stage": stage, **GROUPS[1]}, 1) for stage in (2, 3)),
    *(({"stage": stage, **group}, 4) for stage, group in itertools.product((1, 2, 3), GROUPS)),
    ({"stage": 2, **BITS}, 1),
    ({"stage": 3, **BITS, "zero_quantized_weights": True}, 1),
    ({"stage": 3, **BITS, "zero_quantized_weights": True, "sharding_group": 1}, 1),
    ({"stage": 3, "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}, 1),
]


def config_of(zero: dict[str, Any], accumulation: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage3_param_persistence_threshold": 24, **zero},
    }


def bytes_sent(zero: dict[str, Any], accumulation: int) -> tuple[int, int]:
    """Return what this rank sends to its host and to the other one in the third step, numbers of the step left out."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config_of(zero, accumulation))[0]
    sent, original, host = [0, 0], dist.isend, dist.get_rank() // PER_HOST

    def isend(tensor: torch.Tensor, **call: Any) -> Any:
        if tensor.dtype != torch.float64 and call["tag"] != comm._OBJECTS_TAG:
            sent[call["group_dst"] // PER_HOST != host] += tensor.nbytes
        return original(tensor, **call)

    with unittest.mock.patch.object(dist, "isend", isend):
        for _ in range(3):
            sent[:] = [0, 0]
            for _ in range(accumulation):
                engine.backward(engine(**batch()).loss)
                engine.step()
    return sent[0], sent[1]


def all_bytes_sent() -> list[tuple[int, int]]:
    with unittest.mock.patch("hf_zero.distributed.comm.host_name", lambda: str(dist.get_rank() // PER_HOST)):
        return [bytes_sent(*job) for job in JOBS]


@pytest.fixture(scope="module")
def measured() -> list[list[tuple[int, int]]]:
    """Return by rank what it sends in each job."""
    return run_ranks(all_bytes_sent, WORLD, timeout=120)


@pytest.mark.parametrize("job", range(len(JOBS)), ids=[f"{zero}, {micro} micro-batches" for zero, micro in JOBS])
def test_a_plan_counts_what_ranks_send(job: int, measured: list[list[tuple[int, int]]]) -> None:
    zero, accumulation = JOBS[job]
    with torch.device("meta"):
        model = llama()
    config = ZeroConfig.load(config_of(zero, accumulation)).resolve(model=model, world_size=WORLD)
    profile = measure(model, config, batch("meta"), on_host=True)
    for rank in range(WORLD):
        plan = plan_model(model, config, rank=rank, on_host=True, per_host=PER_HOST, profile=profile)
        inside = sum(one.times * one.traffic.inside for one in plan.passes)
        across = sum(one.times * one.traffic.across for one in plan.passes)
        assert (inside, across) == measured[rank][job]
        decoded = sum(one.traffic.decoded for one in plan.passes)
        assert (decoded > across) == ("zero_quantized_gradients" in zero)


@pytest.mark.parametrize("on_host", [True, False])
def test_the_memory_of_8_bit_messages_is_counted(on_host: bool) -> None:
    numel, number = 8 * 1000, 2  # 4 blocks of at most 256 elements for each of 8 ranks, in two groups
    message = 1000 + 4 * 4

    def peaks(kinds: set[Any]) -> list[int]:
        pretended = PretendedComm(0, 8, on_host=on_host)
        pretended.shard_in_groups(4)
        pretended.quantize(kinds)
        full, part, row = (torch.empty(numel // parts, device="meta") for parts in (1, 8, 4))
        with StorageTracker() as tracker:
            pretended.all_gather_in_group(full, row, part, "weights", may_quantize=True).wait()
            gathering = tracker.restart_peak()
            pretended.reduce_scatter(part, full, "gradients", may_quantize=True).wait()
            return [gathering, tracker.restart_peak()]

    plain, quantized = peaks(set()), peaks({"weights", "gradients"})
    more = [with_bits - without for with_bits, without in zip(quantized, plain, strict=True)]
    assert more == [(1 + number) * message, 2 * number * message]


def test_a_ring_enters_each_host_once() -> None:
    counter = TrafficCounter(rank=5, world_size=16, per_host=8, direct=False)
    counter.begin("forward")
    counter.among_all("all_gather", 1600)
    counter.among_all("all_reduce", 1600)
    counter.among(tuple(range(16)), 100)
    # 15 shares of 100 bytes come to a rank, and to a host; an all-reduce is a reduce-scatter and an all-gather.
    traffic = counter.passes[0].traffic
    assert (traffic.inside + traffic.across, 8 * traffic.across) == (4 * 1500, 4 * 1500)


def test_operations_of_a_model() -> None:
    weight = torch.empty(30, 20, device="meta", requires_grad=True)
    with FlopCounter() as counter:
        output = torch.empty(50, 20, device="meta") @ weight.t()
        assert counter.total == 2 * 50 * 20 * 30
        output.sum().backward()
    assert counter.total == 2 * 2 * 50 * 20 * 30  # no gradient of the input


SPEEDS = Speeds(flops=100.0, link=1000.0, network=50.0, latency=0.5)


@pytest.mark.parametrize(
    ("passes", "computing", "waiting", "across"),
    [
        ([Pass("forward", 1, Traffic()), Pass("backward", 1, Traffic())], 3.0, 0.0, 0.0),
        # 2 operations, and 100 bytes for each of 2 ranks of a host: 1 s + 4 s beside 1 s of computing. Half of that
        # is the first operation's, which delays the computing by all of it.
        ([Pass("forward", 1, Traffic(2, 500.0, 100.0))], 1.0, 4.0 + 1.0, 200.0),
        # 1 s + 0.5 s beside 2 s: the first operation is not hidden.
        ([Pass("backward", 1, Traffic(2, 500.0, 0.0))], 2.0, 0.75, 0.0),
        ([Pass("update", 1, Traffic(1, 500.0, 50.0))], 0.0, 2.5, 100.0),
        ([Pass("backward", 3, Traffic(4, 1000.0, 0.0))], 6.0, 3 * (1.0 + 0.75), 0.0),
    ],
)
def test_the_time_of_a_step(passes: list[Pass], computing: float, waiting: float, across: float) -> None:
    profile = Profile((), "", 0, 0, forward_flops=100, backward_flops=200)
    time = step_time(passes, profile, SPEEDS, per_host=2)
    assert (time.computing, time.waiting, time.across) == pytest.approx((computing, waiting, across))


def test_ranks_on_the_cpu_do_the_work_of_communicating() -> None:
    profile = Profile((), "", 0, 0, forward_flops=100, backward_flops=200)
    passes = [Pass("forward", 1, Traffic(2, 400.0, 100.0)), Pass("backward", 2, Traffic(1, 0.0, 10.0))]
    speeds = dataclasses.replace(SPEEDS, on_host=True, decode=500.0)
    time = step_time(passes, profile, speeds, per_host=2)
    # 1 s + 0.5 s of work, and 4 s of the link beside 1 s, of which the first of two operations delays it by all of it;
    # then twice 0.5 s + 0.01 s of work, and the only operation's 0.4 s of the link.
    assert (time.computing, time.waiting) == pytest.approx((1.0 + 2 * 2.0, 1.5 + 3.0 + 1.0 + 2 * (0.51 + 0.4)))
    # 0.5 s + 0.2 s of work beside 8 s of the link; then 0.5 s + 0.1 s of work, 0.4 s for the values of 8-bit messages,
    # and 0.4 s of the link.
    passes = [Pass("update", 1, Traffic(1, 0.0, 200.0)), Pass("backward", 1, Traffic(1, 90.0, 10.0, 200.0))]
    time = step_time(passes, profile, speeds, per_host=2)
    assert (time.computing, time.waiting) == pytest.approx((2.0, 8.0 + 1.4))
