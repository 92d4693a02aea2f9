"""One rank runs out of memory: all ranks stop at once, and auto_find_batch_size makes the same next attempt on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.hf import memory_runs


def zero(stage: int, **blocks: Any) -> dict[str, Any]:
    block = {"stage": stage, "stage3_param_persistence_threshold": 40, **blocks}
    return {
        "zero_optimization": block,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "desync_timeout": 60,  # a test that needs it fails by its time
    }


CPU = {"device": "cpu"}
IN_A_WINDOW = {"gradient_accumulation_steps": 2, "since": 1}  # a micro-batch of it is over
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("stage 0, backward", zero(0), {"where": "backward"}),
    ("stage 1, accumulation", zero(1), IN_A_WINDOW),
    ("stage 2, backward", zero(2), {"where": "backward"}),
    ("stage 2, optimizer offloaded", zero(2, offload_optimizer=CPU), {}),
    ("stage 3, forward", zero(3), {}),
    ("stage 3, both ranks, accumulation", zero(3), {"guilty": (0, 1), "gradient_accumulation_steps": 2}),
    ("stage 3, checkpointing", zero(3), {"gradient_checkpointing": True, "where": "backward"}),
    ("stage 3, groups, accumulation", zero(3, sharding_group=1), {**IN_A_WINDOW, "where": "backward"}),
    ("stage 2, groups, accumulation", zero(2, sharding_group=1), IN_A_WINDOW),
    ("stage 3, all offloaded", zero(3, offload_param=CPU, offload_optimizer=CPU), {"where": "backward"}),
]
AT_NIGHT = ("stage 2, backward", "stage 2, optimizer offloaded", "stage 3, forward", "stage 3, checkpointing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more"),
    [pytest.param(*case[1:], id=case[0], marks=[pytest.mark.nightly] * (case[0] in AT_NIGHT)) for case in CASES],
)
def test_the_next_attempt_is_a_training_of_its_own(
    config: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    """Eight samples do not fit, seven do not, six do: the run is the one that starts with six."""
    more = {"max_steps": 3, **more}
    outcomes = run_ranks(memory_runs.found_and_plain, 2, config, str(tmp_path), timeout=50, init_group=False, **more)
    found, plain = zip(*outcomes, strict=True)
    guilty = more.get("guilty", (1,))
    for rank, (got, want) in enumerate(zip(found, plain, strict=True)):
        assert got["raised"] == (2 if rank in guilty else 0) and want["raised"] == 0
        assert set(got["batches"]) == {8, 7, 6} and set(want["batches"]) == {6}
        assert got["micro"] == got["state_batch"] == 6 and got["steps"] == 3
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-6)
        assert got["moved"] > 1e-3
        for name, value in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], value, rtol=1e-5, atol=1e-6)
        assert got["memory"]["total"] == want["memory"]["total"]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "late"), [("forward", 0), ("backward", 2)])
def test_three_ranks_and_steps_before_the_error(where: str, late: int, tmp_path: Path) -> None:
    """Memory fills up after two steps, on the rank in the middle; training goes on from the weights it has by then.

    Another rank comes late: the first two have met to try again while it waits for either of them.
    """
    attempt = {"start": 8, "since": 2, "fits": 7, "where": where, "late": late}
    found = run_ranks(memory_runs.find_batch, 3, zero(3), str(tmp_path), timeout=40, init_group=False, **attempt)
    assert [one["raised"] for one in found] == [0, 1, 0]
    for one in found:
        assert one["batches"][:3] == [8, 8, 8] and set(one["batches"][3:]) == {7}
        assert one["steps"] == 4 and one["losses"] == found[0]["losses"]
    assert found[0]["losses"][-1] < found[0]["losses"][0]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_without_auto_find_every_rank_says_which_one_is_full(stage: int, tmp_path: Path) -> None:
    failures = run_ranks(
        memory_runs.fail_for_good,
        2,
        zero(stage),
        str(tmp_path),
        False,
        2,
        timeout=40,
        expect_error=True,
        init_group=False,
    )
    assert [failure.kind for failure in failures] == ["OutOfMemoryError", "OutOfMemoryError"]
    assert "rank 1 ran out of memory. (CUDA out of memory. Tried to allocate" in failures[0].message
    assert failures[1].message.startswith("CUDA out of memory.")


@pytest.mark.slow
def test_no_batch_fits(tmp_path: Path) -> None:
    failures = run_ranks(
        memory_runs.fail_for_good, 2, zero(3), str(tmp_path), True, 0, timeout=60, expect_error=True, init_group=False
    )
    for failure in failures:
        assert failure.kind == "RuntimeError" and "No executable batch size found" in failure.message


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_update_is_not_repeated(stage: int, tmp_path: Path) -> None:
    failures = run_ranks(
        memory_runs.fail_in_the_update, 2, zero(stage), str(tmp_path), timeout=60, expect_error=True, init_group=False
    )
    assert failures[1].kind == "StateError", failures[1].traceback
    assert "rank 1: memory ran out inside the optimizer's step (OutOfMemoryError)" in failures[1].message
    # The other rank waits for rank 1 in a call of ours, or of Trainer's for its log.
    assert failures[0].kind in ("StateError", "DistBackendError", "RuntimeError", "Killed"), failures[0].traceback


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_trials_of_a_search_are_resolved_each_on_its_own(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    config = zero(stage)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    results = run_ranks(memory_runs.search, 2, config, str(tmp_path), timeout=120, init_group=False)
    trials = results[0]["trials"]
    assert trials == results[1]["trials"]
    assert {(one["micro"], one["lr"]) for one in trials} == {(m, lr) for m in (2, 3) for lr in (1e-4, 1e-2)}
    assert all(one["lr"] == one["argument"] and len(one["losses"]) == 4 for one in trials)
    assert all(one["live"] == 1 for one in trials), "the models of earlier trials are gone"
    assert len({one["eval"] for one in trials}) == 4
    objective, chosen = results[0]["best"]
    assert objective == min(one["eval"] for one in trials) and chosen["learning_rate"] == 1e-2
