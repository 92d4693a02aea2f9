"""Steps recorded on the lag device: the numbers stay those of the CPU; copies and collectives are spans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.engine.parts import register
from hf_zero.extras.monitors.step_trace import StepTrace
from tests.harness.ranks import run_ranks
from tests.lag import device, group
from tests.lag.test_offload import Run, on_cpu, train

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))
RUNS = [Run(3, "cpu", "cpu"), Run(2, "by_torch", accumulation=2)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def profiled(folder: str) -> list[tuple[Any, list[dict[str, Any]]]]:
    device.enable()
    group.register()
    device.set_schedule("late")
    found = []
    for number, run in enumerate(RUNS):
        recorded: list[list[dict[str, Any]]] = []
        stop = register(lambda engine, to=recorded: StepTrace(engine, 1, 1, lambda _, ranks: to.append(ranks)))
        numbers, _ = train("lag", run, f"{folder}/{number}")
        stop()
        torch.accelerator.synchronize()
        assert device.take_reports() == []
        found.append((numbers, recorded[0]))
    return found


def test_recording_changes_no_number(tmp_path: Path) -> None:
    expected = run_ranks(on_cpu, 2, RUNS, str(tmp_path / "cpu"))
    for rank, found in enumerate(run_ranks(profiled, 2, str(tmp_path / "lag"))):
        for (numbers, ranks), want in zip(found, expected[rank], strict=True):
            assert repr(numbers) == repr(want)
            assert [one["rank"] for one in ranks] == [0, 1]
    for number, lanes in enumerate(({"gather", "copy to device"}, set())):
        for one in found[number][1]:
            spans = one["spans"]
            wanted = {"forward", "backward", "step", "reduce", "copy to host", "update", *lanes}
            assert {span["lane"] for span in spans} >= wanted
            assert all(span["ms"] >= 0 for span in spans)
            assert all(span["nbytes"] > 0 for span in spans if span["lane"] == "copy to host")
