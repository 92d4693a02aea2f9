"""A rank of a Trainer is lost while the others wait in a collective of Trainer's own: they name it all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.ranks import run_ranks
from tests.hf.fault_runs import WORLD_SIZE, Case, train

SAID = {
    "SIGKILL": "did not complete: rank(s) [1] have ended",
    "exception": "rank 1 of 3 ended by ValueError: a mistake in the script of one rank",
    "out of memory": "rank 1 ran out of memory. (CUDA out of memory",
}


@pytest.mark.parametrize("fault", SAID)
def test_the_others_name_the_rank(fault: str, tmp_path: Path) -> None:
    """An evaluation at stage 0 waits in accelerate's gathers alone."""
    case = Case(0, fault, "evaluate", stage=0, rank=1, step=2, call=1, point="", workers=0, in_background=False)
    failures = run_ranks(train, WORLD_SIZE, case, 0, str(tmp_path), expect_error=True)
    for failure in (failures[0], failures[2]):
        assert failure.kind == ("OutOfMemoryError" if fault == "out of memory" else "DivergenceError"), (
            failure.traceback
        )
        assert SAID[fault] in failure.message, failure.message
