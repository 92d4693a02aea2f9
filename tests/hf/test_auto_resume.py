"""`resume_from_checkpoint="auto"`: a run that was cut off goes on from its newest whole checkpoint, by itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_zero.errors import CheckpointError
from hf_zero.extras.launcher.node import free_port
from hf_zero.hf.trainer.resume import agree_on_checkpoint
from tests.harness.launches import bare_environment
from tests.harness.ranks import run_ranks, try_ranks
from tests.hf import elastic_runs

ROOT = Path(__file__).parents[2]
NEVER = 0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    outcome = run_ranks(elastic_runs.train, 2, str(folder), NEVER, init_group=False)[0]
    (folder / "outcome.json").write_text(json.dumps(outcome))
    return folder


def outcome_in(folder: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return outcome


def test_the_newest_whole_checkpoint_is_taken(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(unbroken, folder)
    (folder / "checkpoint-6" / "trainer_state.json").unlink()
    ended = try_ranks((elastic_runs.train, (str(folder), NEVER), {}), 2, init_group=False)
    assert [outcome["losses"] for outcome in ended.outcomes] == [outcome_in(unbroken)["losses"]] * 2, ended
    assert ended.outcomes[0]["weights"] == outcome_in(unbroken)["weights"]
    assert f"'auto': training goes on from {folder}/checkpoint-4" in ended.logs
    assert ended.logs.count("passing over checkpoint-6") == 1


@pytest.mark.parametrize("holds", ["nothing", "a checkpoint that is not whole"])
def test_without_one_a_run_starts_anew(unbroken: Path, holds: str, tmp_path: Path) -> None:
    if holds != "nothing":
        shutil.copytree(unbroken / "checkpoint-2", tmp_path / "checkpoint-2")
        (tmp_path / "checkpoint-2" / "zero" / "rank-00001.safetensors").unlink()
    ended = try_ranks((elastic_runs.train, (str(tmp_path), NEVER), {"resume": "auto"}), 2, init_group=False)
    assert ended.outcomes[1]["losses"] == outcome_in(unbroken)["losses"], ended
    assert ended.logs.count(f"'auto': {tmp_path} holds no complete checkpoint, training starts anew") == 1


def agree_where(folders: Sequence[str]) -> Any:
    """Agree from a folder of each rank, as if each saw another state of one file system."""
    os.chdir(folders[dist.get_rank()])
    try:
        return agree_on_checkpoint(SimpleNamespace(output_dir="out", process_index=dist.get_rank()), "auto")
    except CheckpointError as error:
        return str(error)


def test_the_ranks_take_one_that_all_of_them_see(unbroken: Path, tmp_path: Path) -> None:
    for rank, numbers in enumerate([(2, 4, 6), (2, 4)]):
        for number in numbers:
            name = f"checkpoint-{number}"
            (tmp_path / str(rank) / "out").mkdir(parents=True, exist_ok=True)
            (tmp_path / str(rank) / "out" / name).symlink_to(unbroken / name)
    folders = [str(tmp_path / "0"), str(tmp_path / "1")]
    assert run_ranks(agree_where, 2, folders) == ["out/checkpoint-4"] * 2
    shutil.rmtree(tmp_path / "1" / "out")
    for said in run_ranks(agree_where, 2, folders):  # to start anew would write over what the others see
        assert "different checkpoints: ['out/checkpoint-6', None]" in said


def torchrun(folder: Path, kill_after: int, what: str, *options: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.hf.elastic_runs"]
    return subprocess.Popen(
        [*line, str(folder), str(kill_after), what],
        cwd=ROOT,
        env=bare_environment(PYTHONPATH=str(ROOT), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended_well(job: subprocess.Popen[str]) -> str:
    try:
        text = job.communicate(timeout=150)[1]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, text
    return text


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_the_run_equals_an_unbroken_one(unbroken: Path, tmp_path: Path) -> None:
    job = torchrun(tmp_path, 5, "rank", f"--master-port={free_port()}", "--nproc-per-node=2", "--max-restarts=1")
    text = ended_well(job)
    assert f"'auto': {tmp_path} holds no complete checkpoint, training starts anew" in text
    assert f"'auto': training goes on from {tmp_path}/checkpoint-4" in text
    assert outcome_in(tmp_path) == outcome_in(unbroken)


@pytest.mark.nightly
def test_a_run_goes_on_without_a_host_that_was_lost(tmp_path: Path) -> None:
    """Two agents stand for two hosts. One is killed with its rank; the other one goes on alone."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # either agent may end
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0,last_call_timeout=8"]
    jobs = [torchrun(tmp_path, 3, "host", *options, f"--node-rank={rank}") for rank in range(2)]
    try:
        until = time.monotonic() + 120
        while all(job.poll() is None for job in jobs) and time.monotonic() < until:
            time.sleep(0.1)
        (left,) = [job for job in jobs if job.poll() is None]
        text = ended_well(left)
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert f"training goes on from {tmp_path}/checkpoint-2" in text
    outcome = outcome_in(tmp_path)
    assert outcome["world_size"] == 1 and outcome["steps"] == 6 and len(outcome["losses"]) == 6
