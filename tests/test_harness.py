"""The harness itself: results, errors, hangs and isolation of jobs on several ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.ranks import RankFailure, run_ranks
from tests.harness.scripts import run_script


def _sum_over_ranks(value: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
    total = value * (dist.get_rank() + 1) * scale
    dist.all_reduce(total)
    return {"total": total, "rank": dist.get_rank(), "world": dist.get_world_size(), "pid": os.getpid()}


def _same(value: Any) -> Any:
    return value


def _raise_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()
    return dist.get_rank()


def _raise_while_rank_0_sleeps() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    time.sleep(60)


def _raise_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()}")


def _sleep_on(rank: int) -> None:
    print("before the sleep")
    if dist.get_rank() == rank:
        time.sleep(1000)


def _die() -> None:
    os._exit(7)


def _environment() -> tuple[str, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "EXTRA")
    assert not dist.is_initialized()
    return tuple(os.environ[name] for name in names)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_of_all_ranks(world_size: int) -> None:
    results = run_ranks(_sum_over_ranks, world_size, torch.ones(3), scale=2.0)
    assert [result["rank"] for result in results] == list(range(world_size))
    for result in results:
        assert result["total"].tolist() == [world_size * (world_size + 1.0)] * 3
        assert result["world"] == world_size


def test_tensors_travel_unchanged() -> None:
    sent = [torch.arange(6).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 2).bool()]
    sent += [torch.arange(6.0).reshape(2, 3).t(), nn.Parameter(torch.ones(2)), torch.zeros(3, device="meta")]
    sent += [torch.tensor([1j])]
    [received] = run_ranks(_same, 1, sent)
    for before, after in zip(sent, received, strict=True):
        assert type(before) is type(after)
        assert (before.dtype, before.shape, before.stride(), before.device, before.requires_grad) == (
            *(after.dtype, after.shape, after.stride(), after.device, after.requires_grad),
        )
        assert before.is_meta or before.tolist() == after.tolist()
    received[0][0, 0] = 7  # its memory may be written


def test_every_job_has_processes_of_its_own() -> None:
    first = run_ranks(_sum_over_ranks, 2, torch.ones(1))
    second = run_ranks(_sum_over_ranks, 2, torch.ones(1))
    assert len({result["pid"] for result in first + second}) == 4


def test_an_exception_fails_the_test_with_its_traceback() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 1: ValueError[\s\S]*_raise_on[\s\S]*on purpose"):
        run_ranks(_raise_on, 2, 1)


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_failed_is_shown_with_its_stack() -> None:
    text = r"rank 0: Killed\n[\s\S]*_raise_while_rank_0_sleeps[\s\S]*rank 1: ValueError"
    with pytest.raises(pytest.fail.Exception, match=text):
        run_ranks(_raise_while_rank_0_sleeps, 2)


def test_expected_errors_are_returned() -> None:
    outcomes = run_ranks(_raise_everywhere, 2, expect_error=True)
    assert [(outcome.rank, outcome.kind) for outcome in outcomes] == [(0, "KeyError"), (1, "KeyError")]
    assert isinstance(outcomes[1], RankFailure) and isinstance(outcomes[1].exception, KeyError)
    with pytest.raises(pytest.fail.Exception, match="every rank returned"):
        run_ranks(_sum_over_ranks, 1, torch.ones(1), expect_error=True)


@pytest.mark.slow
def test_a_hang_fails_with_the_stack_of_the_rank() -> None:
    started = time.monotonic()
    text = r"^hang: rank\(s\) \[.*1\][\s\S]*_sleep_on[\s\S]*before the sleep"
    with pytest.raises(pytest.fail.Exception, match=text):
        run_ranks(_sleep_on, 2, 1, timeout=3)
    assert time.monotonic() - started < 8
    assert run_ranks(_raise_on, 2, -1) == [0, 1], "the next job must not notice"


def test_a_dead_process_is_reported() -> None:
    with pytest.raises(pytest.fail.Exception, match="died without an exception"):
        run_ranks(_die, 1)


def test_environment_of_a_launcher() -> None:
    got = run_ranks(_environment, 2, init_group=False, env={"EXTRA": "x"})
    port = got[0][4]
    assert got == [(str(r), str(r), "2", "127.0.0.1", port, "1", "x") for r in range(2)]


SCRIPT = """
import atexit, os, sys
import beside
atexit.register(lambda: print("at exit"))
print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("RANK"), os.environ.get("OTHER"), beside.NAME)
print("to the other file", file=sys.stderr)
if sys.argv[1] == "raise":
    1 / 0
sys.exit({"text": "a text", "3": 3}.get(sys.argv[1]))
"""


def test_scripts_are_run_as_a_process_would(tmp_path: Path) -> None:
    script, folder = tmp_path / "scripts" / "script.py", tmp_path / "folder"
    for path in (script.parent, folder):
        path.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "beside.py").write_text("NAME = 'beside the script'")
    ran = run_script(script, "x", folder=folder, OTHER="set")
    assert ran.status == [0, 0] and ran.errs == ["to the other file\n"] * 2
    line = "__main__ ['x'] {} {} {} beside the script\nat exit\n"
    assert ran.outs == [line.format(folder, rank, "set") for rank in range(2)]
    ran = run_script(script, "x", folder=folder, processes=1, instead={"OTHER": "{rank}"}, timeout=30)
    assert ran.out == line.format(folder, None, "0")
    for argument, status, text in (("text", 1, "a text"), ("3", 3, ""), ("raise", 1, "ZeroDivisionError")):
        ran = run_script(script, argument, folder=folder, processes=1)
        assert ran.status == [status] and text in ran.err
    assert os.listdir(folder) == []
