"""scripts/smoke.py on several devices, rehearsed by two ranks on the lag device."""

from __future__ import annotations

import pytest

from tests.lag import device
from tests.lag.smoke_runs import REHEARSAL, run

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def test_it_runs_to_its_end() -> None:
    done = run("smoke.py", *REHEARSAL, "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = (
        "2 ranks, stage 3, nvme+nvme",
        "a rank of 2 is killed, stage 2",
        "a rank of 2 starts another operation in backward, stage 3",
        "checkpoint of 2 ranks, resumed by 1, stage 3",
    )
    for seen in (*rows, "bench_step.py: all train alike", "speed, zero3"):
        assert f"\n{seen}" in done.stdout, done.stdout
    assert "10 all_gather" in done.stdout


def test_two_ranks_share_one_device() -> None:
    done = run("smoke.py", *REHEARSAL, "--ranks", "2", "--one-device", "--only", "resume", LAG_DEVICES="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\ncheckpoint of 2 ranks, resumed by 1, stage 3" in done.stdout


def test_without_two_gpus_it_says_so() -> None:
    done = run("smoke.py", "--ranks", "0", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == ("smoke: skipped, it needs two or more accelerators, and torch finds 0 here.\n")
    done = run("smoke.py", *REHEARSAL, "--ranks", "3")
    assert done.returncode == 2 and "it needs 3 accelerators, and torch finds 2 here" in done.stdout


def test_a_rank_that_goes_on_is_found() -> None:
    """The check of a killed rank, where the others do not notice, or say nothing of ours."""
    code = """
from smoke_checks import failed_rank
from smoke_checks.ranks import Ended
ends = [(1, 9.0, "DivergenceError"), (0, 9.0, ""), (1, 9.0, "RuntimeError: x"), (1, 99.0, "DivergenceError")]
for others in ([Ended(*end)] for end in ends):
    row = failed_rank._judged("name", others, 5.0)
    print(row.status, row.detail)
"""
    said = run("-c", code).stdout.splitlines()
    assert said == [
        "ok DivergenceError after 4.0 s",
        "FAILED rank 0 went on: ",
        "FAILED rank 0 said nothing of ours (status 1): RuntimeError: x",
        "FAILED they took 94 s",
    ]
