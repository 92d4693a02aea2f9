"""Orders of micro-batches by themselves: complete, without a deadlock, and idle and full as their papers say."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from hf_zero.extras.pipeline.stage_schedules import SCHEDULES, Kind, bubble_share, order_of, peak_live, simulate


def cases() -> Iterator[tuple[str, int, int, int]]:
    """Return (schedule, stages, micro-batches, chunks of a stage)."""
    for schedule, stages, micros in itertools.product(SCHEDULES, range(1, 7), range(1, 15)):
        for chunks in {"interleaved": (2, 3), "gpipe": (1, 2), "1f1b": (1, 2)}.get(schedule, (1,)):
            yield schedule, stages, micros, chunks


def test_every_stage_does_everything_once_and_none_waits_for_ever() -> None:
    for schedule, stages, micros, chunks in cases():
        orders = [order_of(schedule, stage, stages, micros, chunks) for stage in range(stages)]
        simulate(orders, chunks)  # raises where they wait for each other
        everything = set(itertools.product(range(chunks), range(micros)))
        for stage, order in enumerate(orders):
            case = schedule, stages, micros, chunks, stage
            done = {kind: [(one.chunk, one.micro) for one in order if one.kind is kind] for kind in Kind}
            assert set(done[Kind.FORWARD]) == everything and len(done[Kind.FORWARD]) == len(everything), case
            backwards = done[Kind.BACKWARD] + done[Kind.BACKWARD_INPUT]
            assert set(backwards) == everything and len(backwards) == len(everything), case
            assert done[Kind.BACKWARD_INPUT] == done[Kind.BACKWARD_WEIGHT], case
            ends = min(micros, stages - stage) if schedule == "1f1b" and chunks == 1 and stage > 0 else 0
            assert len(done[Kind.BACKWARD_INPUT]) == (micros if schedule == "zero_bubble" else ends), case


@pytest.mark.parametrize(
    ("schedule", "chunks", "parts_of_a_micro_batch"),
    [("gpipe", 1, 1), ("1f1b", 2, 2), ("interleaved", 2, 2), ("interleaved", 3, 3), ("zero_bubble", 1, 3)],
)
def test_the_idle_share_is_that_of_the_papers(schedule: str, chunks: int, parts_of_a_micro_batch: int) -> None:
    for stages, rounds in itertools.product((1, 2, 3, 4, 8), (1, 2, 5)):
        micros = stages * rounds
        want = (stages - 1) / (parts_of_a_micro_batch * micros + stages - 1)
        assert bubble_share(schedule, stages, micros, chunks) == pytest.approx(want)


def test_the_last_backwards_of_1f1b_in_halves_make_its_end_shorter() -> None:
    """The end waits for one forward and one half of a backward of each later stage, and not for two halves."""
    for stages, micros in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 8, 20)):
        want = 2 * (stages - 1) / (3 * micros + 2 * (stages - 1))
        assert bubble_share("1f1b", stages, micros) == pytest.approx(want)
        assert want < bubble_share("gpipe", stages, micros) or stages == 1


def test_groups_that_are_not_full_leave_more_idle() -> None:
    assert bubble_share("interleaved", 3, 7, 2) > 2 / (2 * 7 + 2)
    assert bubble_share("gpipe", 3, 7) == pytest.approx(2 / (7 + 2))


def test_live_micro_batches_are_those_of_the_papers() -> None:
    for schedule, stages, micros, chunks in cases():
        if chunks > 1:
            continue
        for stage in range(stages):
            most = {"gpipe": micros, "1f1b": min(micros, stages - stage), "zero_bubble": min(micros, stages)}
            live = peak_live(order_of(schedule, stage, stages, micros))
            if schedule == "zero_bubble":
                assert live <= most[schedule]
            else:
                assert live == most[schedule]
