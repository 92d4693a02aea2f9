"""Collectives of the lag device: gloo's results, seen by nobody who has not waited."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_ranks
from tests.lag import device, group

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

WORLD = 2
COUNT = 6


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def _on_lag(case: Callable[[int], None]) -> None:
    device.enable()
    group.register()
    torch.accelerator.set_device_index(dist.get_rank())
    case(dist.get_rank())
    torch.accelerator.synchronize()
    assert device.take_reports() == []


def values_of(rank: int, place: str = "lag", count: int = COUNT) -> torch.Tensor:
    return (torch.arange(float(count)) + 10 * rank).to(place)


def new_group() -> dist.ProcessGroup:
    made = dist.new_group(backend="lag")
    assert isinstance(made, group.LagGroup)
    return made


def _results(rank: int, place: str, chosen: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the results of every collective, from the same values."""
    mine = values_of(rank, place)
    everyone, part, out = mine.new_empty(WORLD * COUNT), mine.new_empty(COUNT // WORLD), mine.new_empty(COUNT)
    total, largest, same = mine.clone(), mine.clone(), mine.clone()
    sent = [1, 2] if rank == 0 else [3, 3]
    received = [1, 3] if rank == 0 else [2, 3]
    uneven = mine.new_empty(sum(received))
    dist.all_gather_single(everyone, mine, group=chosen)
    dist.reduce_scatter_single(part, mine, group=chosen)
    dist.all_reduce(total, group=chosen)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=chosen)
    dist.broadcast(same, group_src=1, group=chosen)
    dist.all_to_all_single(out, mine, group=chosen)
    dist.all_to_all_single(uneven, values_of(rank, place, sum(sent)), received, sent, group=chosen)
    return [tensor.cpu() for tensor in (everyone, part, total, largest, same, out, uneven)]


def results_are_those_of_gloo(rank: int) -> None:
    chosen = new_group()
    for schedule in ("late", "early", "random:3"):
        device.set_schedule(schedule)
        ours = _results(rank, "lag", chosen)
        assert all(map(torch.equal, ours, _results(rank, "cpu", dist.group.WORLD)))
    dist.barrier(group=chosen)
    objects: list[object] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": rank}, group=chosen)
    assert objects == [{"rank": 0}, {"rank": 1}]


def coalesced_collectives_are_one_task(rank: int) -> None:
    """The inputs may be of any types, but for all-reduces; an input may lie in its output."""
    chosen = new_group()
    for schedule in ("late", "early", "random:3"):
        device.set_schedule(schedule)
        ours = _coalesced_results(chosen, rank, "lag")
        assert all(map(torch.equal, ours, _coalesced_results(dist.group.WORLD, rank, "cpu")))
    with pytest.raises(TypeError, match="identical type"):
        chosen.allreduce_coalesced([values_of(rank), values_of(rank).half()], dist.AllreduceOptions())


def _coalesced_results(chosen: Any, rank: int, place: str) -> list[torch.Tensor]:
    float32, float64 = values_of(rank, place), values_of(rank, place).double()
    gathered, full = float32.new_zeros(WORLD * COUNT), float64.new_zeros(WORLD * COUNT)
    part = full[rank * COUNT :][:COUNT].copy_(float64)
    reduced, halves = float32.new_zeros(COUNT // WORLD), float64.new_zeros(COUNT // WORLD)
    totals = [float32.clone(), float32 + 1]
    if place == "cpu":
        dist.all_gather_single(gathered, float32, group=chosen)
        dist.all_gather_single(full, part.clone(), group=chosen)
        dist.reduce_scatter_single(reduced, float32, group=chosen)
        dist.reduce_scatter_single(halves, float64, group=chosen)
        for total in totals:
            dist.all_reduce(total, group=chosen)
        return [gathered, full, reduced, halves, *totals]
    device.take_syncs()
    calls: list[list[Callable[..., Any]]] = [
        [partial(dist.all_gather_single, gathered, float32), partial(dist.all_gather_single, full, part)],
        [partial(dist.reduce_scatter_single, reduced, float32), partial(dist.reduce_scatter_single, halves, float64)],
        [partial(dist.all_reduce, total) for total in totals],
    ]
    works = []
    for together in calls:
        with dist.distributed_c10d._coalescing_manager(chosen, async_ops=True) as work:
            for call in together:
                call(group=chosen)
        assert len(work.works) == 1
        works.append(work)
    for work in works:
        work.wait()
    assert device.take_syncs() == []
    return [tensor.cpu() for tensor in (gathered, full, reduced, halves, *totals)]


def output_is_poison_until_the_stream_waits(rank: int) -> None:
    chosen, mine = new_group(), values_of(rank)
    everyone = torch.zeros(WORLD * COUNT, device="lag")
    work = dist.all_gather_single(everyone, mine, group=chosen, async_op=True)
    device.take_syncs()
    assert (everyone + 0).isnan().all()
    assert not work.is_completed()
    device.take_syncs()
    work.wait()
    assert device.take_syncs() == [], "the host does not wait"
    assert (everyone + 0).cpu().tolist() == [*range(COUNT), *range(10, 10 + COUNT)]
    total = values_of(rank)
    work = dist.all_reduce(total, group=chosen, async_op=True)
    assert total.isnan().all()
    work.wait()
    assert total.tolist() == [10 + 2 * i for i in range(COUNT)]


def input_may_lie_in_the_output(rank: int) -> None:
    chosen = new_group()
    everyone = torch.zeros(WORLD * COUNT, device="lag")
    part = everyone[rank * COUNT :][:COUNT].copy_(values_of(rank))
    work = dist.all_gather_single(everyone, part, group=chosen, async_op=True)
    assert torch.equal(part, values_of(rank)), "the input stays"
    assert everyone[(1 - rank) * COUNT :][:COUNT].isnan().all()
    work.wait()
    assert everyone.tolist() == [*range(COUNT), *range(10, 10 + COUNT)]


def input_is_read_when_the_collective_runs(rank: int) -> None:
    """A program that writes to the input before it waits gets wrong numbers under the late schedule."""
    chosen, mine = new_group(), values_of(rank)
    everyone = torch.zeros(WORLD * COUNT, device="lag")
    work = dist.all_gather_single(everyone, mine, group=chosen, async_op=True)
    mine.zero_()
    work.wait()
    assert everyone.eq(0).all()


def memory_freed_under_a_collective_is_reported(rank: int) -> None:
    chosen, mine = new_group(), values_of(rank)
    everyone = torch.zeros(WORLD * COUNT, device="lag")
    work = dist.all_gather_single(everyone, mine, group=chosen, async_op=True)
    work._tensors = []
    del mine
    with pytest.raises(RuntimeError, match="was freed while stream 1"):
        work.wait()
        torch.accelerator.synchronize()
    assert len(device.take_reports()) == 1


def tensors_of_another_device_are_refused(rank: int) -> None:
    chosen, elsewhere = new_group(), torch.ones(2, device=torch.device("lag", 1 - rank))
    with pytest.raises(ValueError, match=f"computes on lag:{rank}, and a tensor is on lag:{1 - rank}"):
        dist.all_reduce(elsewhere, group=chosen)


def aborted_group_says_nothing(rank: int) -> None:
    chosen = new_group()
    everyone = torch.zeros(WORLD * COUNT, device="lag")
    work = dist.all_gather_single(everyone, values_of(rank), group=chosen, async_op=True)
    chosen.abort()
    work.wait()
    assert everyone.isnan().all()


CASES = [
    results_are_those_of_gloo,
    coalesced_collectives_are_one_task,
    output_is_poison_until_the_stream_waits,
    input_may_lie_in_the_output,
    input_is_read_when_the_collective_runs,
    memory_freed_under_a_collective_is_reported,
    tensors_of_another_device_are_refused,
    aborted_group_says_nothing,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_group(case: Callable[[int], None]) -> None:
    run_ranks(_on_lag, WORLD, case)
