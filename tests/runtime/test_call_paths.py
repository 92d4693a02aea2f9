"""The ways of a gather and of a gradient stay short: whoever reads the code follows them through few files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.harness.ranks import run_ranks

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "call_paths.py"


def ways() -> dict[str, tuple[int, set[str]]]:
    """By what happens: calls on the way, and their files."""
    spec = importlib.util.spec_from_file_location("call_paths", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = {}
    for title, calls in script.paths().items():
        marked = [calls[at] for at in script.way(calls)]
        found[title] = len(marked), script.files(marked)
    return found


def test_ways_are_short() -> None:
    (found, _) = run_ranks(ways, 2)
    calls, files = found["gather of a layer"]
    ends = {"distributed/comm.py", "distributed/group_work.py"}  # it is started, and can be waited for
    assert files == {"runtime/hooks.py", "runtime/unshard.py", "sharding/unit.py"} | ends
    assert calls <= 10
    arrival, reduce = found["arrival of a gradient"][1], found["reduce of a layer's gradients"][1]
    assert {"runtime/hooks.py", "runtime/reduce_schedule.py", "runtime/grad_accumulator.py"} <= arrival | reduce
    assert "distributed/comm.py" in reduce and len(arrival | reduce) <= 8
