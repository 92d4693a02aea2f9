"""The ways of a parameter, a gradient and a saved tensor stay short: a reader follows them through few files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from tests.harness.ranks import run_ranks

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "call_paths.py"
WHOLE = ("setup of a parameter", "save of a tensor")  # recorded as ways, indented by depth


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("call_paths", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ways() -> dict[str, list[str]]:
    """Return by what happens: the calls on the way, as file:function."""
    tool = script()
    return {
        title: calls if title in WHOLE else [calls[at].strip() for at in tool.way(calls)]
        for title, calls in tool.paths().items()
    }


def test_ways_are_short() -> None:
    (found, _) = run_ranks(ways, 2)
    tool = script()
    setup, save, gather, arrival, reduce = found.values()
    assert "distributed/comm.py:Comm.all_gather" in gather and len(gather) <= 10 and len(tool.files(gather)) <= 5
    # The setup, from `initialize` on, ends with the hook that begins the gather.
    until_gather = gather[: gather.index("distributed/comm.py:Comm.all_gather") + 1]
    assert setup[-1].strip() == "runtime/hooks.py:ModelHooks.on_layer" and gather[0] == "runtime/hooks.py:before"
    assert len(tool.files([*setup, *until_gather])) <= 12 and tool.climbs(setup) <= 3
    reached = ("slice_states", "DataWriter.write", "_Direct.write", "publish")
    assert all(any(call.endswith(end) for call in save) for end in reached) and len(tool.files(save)) <= 9
    assert arrival[-1] == "runtime/grad_accumulator.py:GradAccumulator.take"
    # The hook that gathers the next layer comes before, and the ways of the operation itself after.
    left = reduce.index("engine/step_schedule.py:StepSchedule.unit_left")
    gradient = [*arrival, *reduce[left : reduce.index("distributed/comm.py:Comm.reduce_scatter") + 1]]
    assert len(gradient) <= 10 and len(tool.files(gradient)) <= 6


def test_climbs_are_returns_to_a_file_above() -> None:
    climbs = script().climbs
    assert climbs(["a:f", "  b:g", "    c:h"]) == 0
    assert climbs(["a:f", "  a:g", "  b:h"]) == 0  # he has not left the file
    assert climbs(["a:f", "  b:g", "  c:h", "    d:i", "  e:j"]) == 2
