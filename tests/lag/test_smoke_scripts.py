"""The smoke scripts of scripts/, rehearsed on the lag device: whoever has a GPU shall not be the first to run them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.lag import device

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = ("--device", "lag", "--size", "tiny", "--patience", "4")


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_one_gpu() -> None:
    done = run("gpu_smoke.py", *REHEARSAL, "--only", "lifetimes,shared,memory,speed,theirs")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = ("resume, stage 3, nvme+nvme", "teardown and second engine, stage 0", "2 ranks on one device, stage 3")
    for seen in rows:
        assert f"\n{seen}" in done.stdout, done.stdout
    assert " FAILED " not in done.stdout


def test_one_gpu_beside_the_cpu() -> None:
    done = run("gpu_smoke.py", *REHEARSAL, "--only", "parity")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not seen (pinned host memory)" in done.stdout
    assert "\nstage 3, cpu+cpu" in done.stdout and "1 for the vote" in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    for more, status in (((), 2), (("--skip-without-gpu",), 0)):
        done = run("gpu_smoke.py", *more, CUDA_VISIBLE_DEVICES="")
        assert (done.returncode, done.stderr) == (status, "")
        assert done.stdout == "gpu_smoke: skipped, torch finds no accelerator here that it can use.\n"


def test_waits_that_cuda_warns_of_have_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mode is not there without a GPU: the calls and the warning are."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    waits = importlib.import_module("smoke.waits")
    modes = []
    module = SimpleNamespace(get_sync_debug_mode=lambda: 0, set_sync_debug_mode=modes.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    with waits.counted(torch.device("cuda")) as found:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)
    assert modes == ["warn", 0]
    assert found == {"test_smoke_scripts.py test_waits_that_cuda_warns_of_have_their_place": 2}
    found["shard.py copy_from"] = 1
    assert "shard.py copy_from" in waits.wrong(found, stage=2, offloaded=False, pinned=True)
    assert waits.wrong(found, stage=3, offloaded=True, pinned=True) == ""


MISTAKES = {
    "losses": "import smoke.training as t; plain = t.run_steps\n"
    "def run_steps(engine, *args, **kwargs):\n"
    "    trained = plain(engine, *args, **kwargs)\n"
    "    trained.losses[-1] *= 1.01 if engine.device.type == 'lag' else 1\n"
    "    return trained\n"
    "t.run_steps = run_steps\n",
    "waits": "import hf_zero.optim.step_ballot as b; on_host = b._on_host\n"
    "b._on_host = lambda tensors: [on_host(tensors), on_host(tensors)][1]\n",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_it_with_status_1(mistake: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import torch\n{MISTAKES[mistake]}"
    code += "import gpu_smoke; gpu_smoke.main()"
    arguments = ["--check", "parity", "--out", str(out), *REHEARSAL, "--folder", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, *arguments], env=env, timeout=300, check=True)
    found = {row["what"]: row for row in json.loads(out.read_text())}
    assert found["stage 0"]["status"] == "FAILED"
    wrong = {"losses": "a loss is off by 1.0e-02", "waits": "the vote waits 2 times"}[mistake]
    assert wrong in found["stage 0"]["detail"], found["stage 0"]
