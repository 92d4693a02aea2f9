"""A rank has died, or left, before a call that needs all: the others are told so at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.test_resume import start, steps
from tests.harness.ranks import run_ranks

SOON_S = 5.0  # of the 12 that a rank which is merely late has


def lose(victim: int, how: str, call: str, folder: str) -> None:
    engine = start(1, seed=0)
    steps(engine, 0, 1)
    dist.barrier()
    if engine.rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)  # a script that is over here
    time.sleep(0.2 if how == "killed" else 0)
    began = time.monotonic()
    try:
        calls: dict[str, Any] = {
            "save_checkpoint": lambda: engine.save_checkpoint(folder),
            "load_checkpoint": lambda: engine.load_checkpoint(folder),
            "full_state_dict": lambda: engine.full_state_dict(keep=True),
        }
        calls[call]()
    finally:
        took = time.monotonic() - began
        assert took < SOON_S, f"{took:.1f} s"


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are found through /proc")
@pytest.mark.parametrize(
    ("victim", "how", "call"),
    [
        (1, "killed", "save_checkpoint"),
        (2, "ended", "full_state_dict"),
        (0, "killed", "save_checkpoint"),  # it holds the key-value store
        (0, "ended", "load_checkpoint"),
    ],
)
def test_the_survivors_are_told(victim: int, how: str, call: str, tmp_path: Any) -> None:
    failures = run_ranks(lose, 3, victim, how, call, str(tmp_path), expect_error=True, timeout=40)
    for rank, failure in enumerate(failures):
        if rank == victim:
            continue
        assert failure.kind == "DivergenceError", failure.traceback
        said = f"of 3: {call} did not complete: "
        assert said in failure.message and "ended" in failure.message, failure.message
        assert "on every rank" not in failure.message
        if victim:
            assert str(victim) in failure.message.partition("rank(s)")[2].partition("]")[0], failure.message
    assert not list(tmp_path.iterdir()), "a save without a rank"
