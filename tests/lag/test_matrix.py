"""Every feature on the lag device at every stage and with every offload: the bits of the CPU, whatever the schedule.

How the runs were chosen. A place is a stage with a medium (stage 0 offloads nothing). A program (matrix_runs.py) uses
several features. Every place runs every program, so it meets every feature: accumulation of 1 and 2 micro-batches,
clipping, LoRA, both kinds of recomputing, generate gathered once and streamed, ShardedEMA, copy_weights,
gathered_params(write_rank), resume at the same and at another world size, memory that ends in forward and in backward.
A program runs under one or two of the five schedules; these go round from program to program and from place to place,
so every place meets all five, and over the places every program does. World sizes go round too: a place meets 1, 2
and 3 ranks. The last test checks all of that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import run_ranks
from tests.lag import device, matrix_runs

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

MEDIA = ("none", "cpu", "nvme", "delayed")
PLACES = [(0, "none"), *((stage, medium) for stage in (1, 2, 3) for medium in MEDIA)]
PER_CHANGE = ((0, "none"), (1, "cpu"), (2, "nvme"), (3, "none"), (3, "delayed"))  # the others at night
SCHEDULES = ("late", "early", "random:1", "random:2", "random:3")
# Numbers of schedules that a program takes from the round: five in all.
SHARES = {"averages_and_edits": 2, "adapters_and_texts": 1, "saved_and_resumed": 1, "out_of_memory": 1}


def schedules_of(program: str, place: int) -> list[str]:
    first = place + sum(
        share for name, share in SHARES.items() if list(SHARES).index(name) < list(SHARES).index(program)
    )
    return [SCHEDULES[(first + more) % len(SCHEDULES)] for more in range(SHARES[program])]


def world_sizes_of(program: str, place: int) -> list[int]:
    """The second one is that of a resume."""
    odd = (1, 3) if place % 2 == 0 else (3, 1)
    return {"averages_and_edits": [odd[0]], "saved_and_resumed": [2, odd[1]]}.get(program, [2])


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


@pytest.mark.parametrize("program", SHARES)
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            number, id=f"stage {place[0]}, {place[1]}", marks=[] if place in PER_CHANGE else pytest.mark.nightly
        )
        for number, place in enumerate(PLACES)
    ],
)
def test_bits_are_those_of_the_cpu(place: int, program: str, tmp_path: Path) -> None:
    stage, medium = PLACES[place]
    schedules = schedules_of(program, place)
    folders = str(tmp_path / "cpu"), str(tmp_path / "lag")
    for number, world_size in enumerate(world_sizes_of(program, place)):
        run: Any = matrix_runs.PROGRAMS[program] if number == 0 else matrix_runs.resumed
        expected = run_ranks(matrix_runs.on_cpu, world_size, run, stage, medium, folders[0], init_group=False)
        assert len(set(expected[0]["losses"])) == len(expected[0]["losses"]), "vacuous: a step changed nothing"
        by_rank = run_ranks(
            matrix_runs.on_lag, world_size, run, stage, medium, folders[1], schedules, init_group=False
        )
        for rank, outcomes in enumerate(by_rank):
            assert outcomes == [expected[rank]] * len(schedules), f"rank {rank}, schedules {schedules}"


def test_places_meet_every_schedule_and_world_size() -> None:
    places = range(len(PLACES))
    assert list(SHARES) == list(matrix_runs.PROGRAMS)
    for place in places:
        assert {one for program in SHARES for one in schedules_of(program, place)} == set(SCHEDULES)
        assert {one for program in SHARES for one in world_sizes_of(program, place)} == {1, 2, 3}
    for program in SHARES:
        assert {one for place in places for one in schedules_of(program, place)} == set(SCHEDULES)
