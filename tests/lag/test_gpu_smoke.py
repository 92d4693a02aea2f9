"""scripts/smoke.py on one device, rehearsed on the lag device: whoever has a GPU shall not be the first to run it."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch

from tests.lag import device
from tests.lag.smoke_runs import REHEARSAL, ROOT, run

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def test_it_runs_to_its_end() -> None:
    done = run("smoke.py", *REHEARSAL)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = ("stage 1, delayed", "stage 3, cpu+cpu, bf16", "stage 2, cpu, unpinned", "resume, stage 3, nvme+nvme")
    more = ("teardown and second engine, stage 0", "peak memory, stage 3")
    for seen in (*rows, *more, "speed, stage 3, cpu+cpu, bf16"):
        assert f"\n{seen}" in done.stdout, done.stdout
    assert "1 for the vote" in done.stdout and "\npinned host memory" in done.stdout
    assert "\nspeed of DeepSpeed, stage 3, cpu+cpu, bf16" in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    for more, status in (((), 2), (("--skip-without-gpu",), 0)):
        done = run("smoke.py", *more, CUDA_VISIBLE_DEVICES="")
        assert (done.returncode, done.stderr) == (status, "")
        assert done.stdout == "smoke: skipped, it needs 1 accelerator, and torch finds 0 here.\n"


def test_waits_that_cuda_warns_of_have_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mode is not there without a GPU: the calls and the warning are."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    waits = importlib.import_module("smoke_checks.waits")
    modes: list[object] = []
    module = SimpleNamespace(get_sync_debug_mode=lambda: 0, set_sync_debug_mode=modes.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with waits.counted(torch.device("cuda")) as found:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)
    assert modes == ["warn", 0]
    assert found == {"test_gpu_smoke.py test_waits_that_cuda_warns_of_have_their_place": 2}
    found["shard.py copy_from"] = 1
    assert "copy_from" in waits.wrong(found, offloaded=False, pinned=True)
    assert waits.wrong(found, offloaded=True, pinned=True) == ""


# Mistakes that go before the check of stage 0, and what its row has to say then.
MISTAKES = {
    "none": ("", "losses within"),
    "losses": (
        "import smoke_checks.training as t; plain = t.run_steps\n"
        "def run_steps(engine, *args, **kwargs):\n"
        "    trained = plain(engine, *args, **kwargs)\n"
        "    trained.losses[-1] *= 1.01\n"
        "    return trained\n"
        "t.run_steps = run_steps\n",
        "a loss is off by 1.0e-02",
    ),
    "waits": (
        "import hf_zero.optim.step_ballot as b; on_host = b._on_host\n"
        "b._on_host = lambda tensors: [on_host(tensors), on_host(tensors)][1]\n",
        "the vote waits 2 times",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_it_with_status_1(mistake: str) -> None:
    """The row of one setting, shown by the program as that of a check."""
    makes, said = MISTAKES[mistake]
    code = f"""
import smoke as program
from smoke_checks import parity, place
from smoke_checks.settings import Setting, Shape
from smoke_checks.training import Task, train_by_torch
{makes}
def run_check(check, args, folder):
    task = Task(program.SIZES["tiny"][0], Shape(tokens=8), str(folder))
    return [parity._row(task, Setting(0), "lag", train_by_torch(task)[0])]
program.run_check = run_check
program.main()
"""
    done = run("-c", code, *REHEARSAL, "--only", "parity")
    assert done.returncode == (0 if mistake == "none" else 1), done.stderr
    assert said in done.stdout
