"""The ways of a gather and of a gradient stay short: whoever reads the code follows them through few files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.harness.ranks import run_ranks

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "call_paths.py"


def ways() -> dict[str, list[str]]:
    """Return by what happens: the calls on the way, as file:function."""
    spec = importlib.util.spec_from_file_location("call_paths", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return {title: [calls[at].strip() for at in script.way(calls)] for title, calls in script.paths().items()}


def files(calls: list[str]) -> set[str]:
    return {call.partition(":")[0] for call in calls}


def test_ways_are_short() -> None:
    (found, _) = run_ranks(ways, 2)
    gather, arrival, reduce = found.values()
    assert "distributed/comm.py:Comm.all_gather" in gather and len(gather) <= 10 and len(files(gather)) <= 5
    assert arrival[-1] == "runtime/grad_accumulator.py:GradAccumulator.take"
    # The hook that gathers the next layer comes before, and the ways of the operation itself after.
    left = reduce.index("engine/step_schedule.py:StepSchedule.unit_left")
    gradient = [*arrival, *reduce[left : reduce.index("distributed/comm.py:Comm.reduce_scatter") + 1]]
    assert len(gradient) <= 10 and len(files(gradient)) <= 6
