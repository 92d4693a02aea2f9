"""The keys that say how gradients and parameters travel: what they send, and that the result stays.

Everything a rank hands to a collective is recorded where comm.py counts it.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.distributed.comm import Comm
from hf_zero.distributed.work import Pending
from hf_zero.runtime.reduce_op import MAX_BUCKETS_IN_FLIGHT
from hf_zero.sharding.unit import UnitKind
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case
from tests.harness.sharded import Options, micro_step, start

SLOW = pytest.mark.slow
STEPS = 3
CASE = Case("plain", 2, 2, single=True)
Keys = tuple[tuple[str, Any], ...]


@dataclasses.dataclass
class Sent:
    op: str
    what: str
    numel: int
    dtype: torch.dtype
    values: torch.Tensor  # as they were when the collective started


@dataclasses.dataclass
class Slice:
    sent: list[Sent]  # in the last step
    weights: dict[str, torch.Tensor]
    norms: list[float | None]

    def calls(self) -> dict[str, int]:
        return dict(collections.Counter(sent.op for sent in self.sent if sent.op != "vote"))

    def largest(self, *ops: str) -> int:
        return max(sent.numel for sent in self.sent if sent.op in ops)


def record(comm: Comm) -> list[Sent]:
    sent: list[Sent] = []
    original = comm._record

    def recording(op: str, what: str, full: torch.Tensor) -> None:
        sent.append(Sent(op, what, full.numel(), full.dtype, full.clone()))
        original(op, what, full)

    comm._record = recording  # type: ignore[method-assign]
    return sent


def train(case: Case, jobs: list[Options]) -> list[Slice]:
    return [_train_one(case, options) for options in jobs]


def _train_one(case: Case, options: Options) -> Slice:
    engine = start(case, options)
    sent = record(engine.comm)
    norms = []
    for step in range(STEPS):
        sent.clear()
        for micro in range(case.accumulation):
            micro_step(engine, case, step, micro, options)
        norms.append(engine.get_global_grad_norm())
    return Slice(list(sent), engine.full_state_dict(keep=True), norms)


def equal(a: Slice, b: Slice) -> bool:
    return a.norms == b.norms and all(torch.equal(value, b.weights[name]) for name, value in a.weights.items())


def assert_near(a: Slice, b: Slice, case: Case) -> None:
    """Compare to 1e-6 of what is summed. Where a true gradient is zero, Adam takes the sign of its
    rounding: so SGD.
    """
    assert case.optimizer == "sgd"
    for name, value in a.weights.items():
        torch.testing.assert_close(value, b.weights[name], rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- which primitive
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=SLOW)])
def test_broadcasts_in_the_place_of_all_gathers(world: int) -> None:
    """allgather_partitions false: after the step every owner broadcasts its part, in every bucket."""
    case = dataclasses.replace(CASE, world=world)
    persistent = ("stage3_param_persistence_threshold", 20)
    settings: list[Keys] = [(persistent,), (persistent, ("allgather_partitions", False))]
    jobs = [Options(stage, zero=zero) for stage in range(4) for zero in settings]
    for runs in run_ranks(train, world, case, jobs):
        for stage, (gathered, broadcast) in enumerate(zip(runs[::2], runs[1::2], strict=True)):
            assert equal(gathered, broadcast)
            before, after = gathered.calls(), broadcast.calls()
            replaced = before.get("all_gather", 0) - after.get("all_gather", 0)
            assert (replaced > 0) == (stage > 0) and "broadcast" not in before
            assert after.get("broadcast", 0) == world * replaced
            assert ("all_gather" in after) == (stage == 3), "layers are gathered on demand all the same"


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=SLOW)])
def test_all_reduces_in_the_place_of_reduce_scatters(world: int) -> None:
    case = dataclasses.replace(CASE, world=world, optimizer="sgd")
    small = ("reduce_bucket_size", 1000)
    settings: list[Keys] = [(small,), (small, ("reduce_scatter", False))]
    jobs = [Options(stage, zero=zero) for stage in range(4) for zero in settings]
    for runs in run_ranks(train, world, case, jobs):
        for stage, (scattered, reduced) in enumerate(zip(runs[::2], runs[1::2], strict=True)):
            if world == 2:  # a + b = b + a; of three, gloo adds in another order
                assert equal(scattered, reduced)
            assert_near(scattered, reduced, case)
            op = "reduce_scatter" if stage else "all_reduce"
            assert scattered.calls()[op] == reduced.calls()["all_reduce"] > 1
            assert "reduce_scatter" not in reduced.calls()


# ---------------------------------------------------------------- bucket sizes
@pytest.mark.slow
def test_bucket_sizes() -> None:
    """No collective moves more, and the result does not depend on them (a clipped one does in its last bits: the norm
    is summed part by part)."""
    sizes = [(100, 100), (1000, 1000), (10**9, 10**9), (700, 10**9), (10**9, 700)]
    jobs = [
        Options(
            stage,
            zero=(("reduce_bucket_size", reduce), ("allgather_bucket_size", gather)),
            config=(("gradient_clipping", 0.0),),
        )
        for stage in range(4)
        for reduce, gather in sizes
    ]
    for runs in run_ranks(train, 2, CASE, jobs):
        for stage in range(4):
            mine = runs[stage * len(sizes) : (stage + 1) * len(sizes)]
            for (reduce, gather), run in zip(sizes, mine, strict=True):
                assert run.largest("reduce_scatter", "all_reduce") <= reduce
                if stage:
                    assert run.largest("all_gather") <= gather
                assert all(torch.equal(value, mine[2].weights[name]) for name, value in run.weights.items()), (
                    f"stage {stage}, {reduce}, {gather}"
                )
            assert len({run.largest("reduce_scatter", "all_reduce") for run in mine}) >= 3


class Wide(nn.Module):
    """`layers` linear layers of `width` x `width` that are a unit each."""

    _no_split_modules = ("Linear",)

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def peak_in_flight(shapes: list[tuple[int, int]], stage: int, dtype: str | None) -> list[tuple[int, int, int]]:
    """Return for each model: its elements, the most elements of gradients on their way at once, receive buffers kept
    for reuse.
    """
    return [_peak_of(layers, width, stage, dtype) for layers, width in shapes]


def _peak_of(layers: int, width: int, stage: int, dtype: str | None) -> tuple[int, int, int]:
    model = Wide(layers, width)
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "communication_data_type": dtype}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    live = [0]
    peaks = [0]
    for name in ("reduce_scatter", "all_reduce"):
        _count_in_flight(engine.comm, name, live, peaks)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, width)))
        engine.step()
    assert live == [0]
    numel = sum(unit.numel for unit in engine.units)
    return numel, max(peaks), engine.comm._received.nbytes // (4 if dtype is None else 2)


def _count_in_flight(comm: Comm, name: str, live: list[int], peaks: list[int]) -> None:
    original = getattr(comm, name)

    class Counted:
        def __init__(self, pending: Pending, numel: int) -> None:
            self.pending, self.numel = pending, numel

        def wait(self) -> None:
            self.pending.wait()
            live[0] -= self.numel
            self.numel = 0

    def counting(*args: Any, **kwargs: Any) -> Pending:
        full = args[0] if name == "all_reduce" else args[1]
        live[0] += full.numel()
        peaks.append(live[0])
        return Counted(original(*args, **kwargs), full.numel())

    setattr(comm, name, counting)


BUCKET = 64


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(2, None), *(pytest.param(*one, marks=SLOW) for one in ((0, None), (1, "bf16"), (3, "fp16")))],
)
def test_buffers_of_constant_size(stage: int, dtype: str | None) -> None:
    """The memory that communication holds at once depends on the bucket, not on the model."""
    shapes = [(2, 32), (6, 32), (2, 96)]
    for measured in run_ranks(peak_in_flight, 2, shapes, stage, dtype):
        assert measured[2][0] > 8 * measured[0][0] > 0
        assert len({peak for _, peak, _ in measured}) == 1
        for _, peak, kept in measured:
            assert 2 * BUCKET <= peak <= 2 * MAX_BUCKETS_IN_FLIGHT * BUCKET
            assert kept <= 2 * MAX_BUCKETS_IN_FLIGHT * BUCKET


# ---------------------------------------------------------------- overlap
@SLOW
def test_overlap_does_not_change_a_bit() -> None:
    jobs = [Options(stage, zero=(("overlap_comm", on),)) for stage in range(4) for on in (True, False)]
    for runs in run_ranks(train, 2, CASE, jobs):
        for on, off in zip(runs[::2], runs[1::2], strict=True):
            assert equal(on, off) and on.calls() == off.calls()


# ---------------------------------------------------------------- volume
def count_bytes(stages: list[int], dtype: str | None) -> list[int]:
    """Return the bytes that a rank takes part in, in a step; an all-reduce counts twice, as on a ring."""
    totals = []
    for stage in stages:
        case = Case("plain", 2, 1, single=True)
        # Layers only: what is read outside of them is held from forward to backward.
        options = Options(stage, config=(("communication_data_type", dtype),))
        engine = start(case, options)
        layers = {b.layout.name for u in engine.units for b in u.flats if u.kind is UnitKind.LAYER}
        sent = record(engine.comm)
        for step in range(STEPS):
            sent.clear()
            micro_step(engine, case, step, 0, options)
        weight = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
        totals.append(sum(weight[s.op] * s.values.nbytes for s in sent if s.what in layers))
    return totals


def test_stage_3_moves_one_and_a_half_times_as_much() -> None:
    for zero, one, two, three in run_ranks(count_bytes, 2, [0, 1, 2, 3], None):
        assert three / two == pytest.approx(1.5, rel=0.05)
        assert one == two > 0 and zero == pytest.approx(two, rel=0.01)
    (_, two, three), *_ = run_ranks(count_bytes, 2, [0, 2, 3], "bf16")
    assert three / two == pytest.approx((4 + 4 + 2) / (4 + 2), rel=0.05), "half of a reduce: what is counted travels"


# ---------------------------------------------------------------- what the layout gives without its key
def look_at_gradients(stage: int) -> tuple[bool, dict[str, tuple[int, int]]]:
    """Return whether gradients are views of one buffer per unit; per unit, the elements it has and those that are
    mine.
    """
    case, options = Case("plain", dist.get_world_size(), 1, single=True), Options(stage)
    engine = start(case, options)
    assert engine.optimizer is not None
    alias = True
    mine: dict[str, tuple[int, int]] = {}
    for owned in engine.optimizer.owned:
        memory = owned.acc.shard.memory.untyped_storage().data_ptr()
        alias &= all(grad.untyped_storage().data_ptr() == memory for grad in owned.grads)
        layout = owned.acc.flat.layout
        mine[layout.name] = (layout.numel, mine.get(layout.name, (0, 0))[1] + owned.slice.numel)
    return alias, mine


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=SLOW)])
def test_gradients_are_contiguous_and_spread(world: int) -> None:
    """contiguous_gradients, round_robin_gradients: every rank has its share of every unit, within one alignment."""
    for stage in (1, 2):
        for alias, mine in run_ranks(look_at_gradients, world, stage):
            assert alias
            for name, (numel, owned) in mine.items():
                assert abs(owned - numel / world) <= 8 * world + 64, (name, numel, owned)
                assert owned > 0.8 * numel / world
