"""A machine with GPUs that torch cannot use, such as one with an old driver: torch finds none and only warns, and
nothing may train on the CPU for that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.distributed import processes
from hf_zero.errors import ConfigError
from hf_zero.extras.cli.main import main
from hf_zero.extras.launcher import node
from hf_zero.extras.launcher.launch_errors import LaunchUsageError
from hf_zero.native import device_files

# Torch raises this at the first use, from c10/cuda/CUDAFunctions.cpp.
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12060). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


def fail_to_start() -> None:
    raise RuntimeError(TOO_OLD)


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A torch for CUDA, on a machine with a GPU and a driver that is too old; the GPU's file."""
    file = tmp_path / "nvidia0"
    file.touch()
    monkeypatch.setattr(device_files, "_FILES", {"CUDA_VISIBLE_DEVICES": (f"{tmp_path}/nvidia[0-9]*",)})
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda._lazy_init", fail_to_start)
    monkeypatch.setattr(processes, "_state_of_accelerate", dict)
    for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return file


def test_it_is_refused_with_torchs_reason(old_driver: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        processes.default_device()
    first, remedy = str(caught.value).split("\n")
    assert str(old_driver) in first and "torch cannot use it: The NVIDIA driver on your system is too old" in first
    assert "Download" not in first and "ACCELERATE_USE_CPU=true" in remedy


def test_it_is_refused_where_accelerate_fell_back(old_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate finds no GPU either, and takes the CPU: that is no wish of the user's."""
    state: dict[str, Any] = {"device": torch.device("cpu"), "_cpu": False}
    monkeypatch.setattr(processes, "_state_of_accelerate", lambda: state)
    with pytest.raises(ConfigError, match="too old"):
        processes.default_device()
    state["_cpu"] = True  # TrainingArguments(use_cpu=True)
    assert processes.default_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_USE_CPU", "true"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles"),
        ("HIP_VISIBLE_DEVICES", "-1"),
    ],
)
def test_who_asks_for_the_cpu_gets_it(
    variable: str, value: str, old_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert processes.default_device() == torch.device("cpu")


@pytest.mark.parametrize("value", ["0", "0,1", "GPU-5b3c", "MIG-11"])
def test_a_chosen_gpu_is_no_wish_for_the_cpu(value: str, old_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(ConfigError):
        processes.default_device()


def test_a_machine_without_gpus_computes_on_the_cpu(old_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_driver.unlink()
    assert processes.default_device() == torch.device("cpu")
    old_driver.touch()
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda *_, **__: None)  # torch for CPUs
    assert processes.default_device() == torch.device("cpu")


def test_the_report_says_so(
    old_driver: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hf_zero.native.devices.visible_devices", list)
    main(["report"])
    said = capsys.readouterr().out
    assert "driver on your system is too old" in said and "none, training runs" not in said


def test_the_launcher_starts_no_processes(old_driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be told to use the CPU, as on a machine without GPUs."""
    plan: Any = SimpleNamespace(devices=[("0",)], use_devices=False, num_nodes=1)
    with pytest.raises(LaunchUsageError, match="too old"):
        node._set_environment(plan, 0)
