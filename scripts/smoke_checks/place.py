"""The device of a smoke run: torch's accelerator, or the lag device of tests/lag, on which its code is rehearsed."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LAG = "lag"
CHOICES = ("accelerator", LAG)
_REPOSITORY = Path(__file__).resolve().parents[2]


def prepare(name: str) -> torch.device | None:
    """Make the named device this process's; None where torch finds no accelerator that can be used."""
    if name == LAG:
        sys.path.insert(0, str(_REPOSITORY))
        from tests.lag import device, group

        if reason := device.reason_to_skip():
            raise SystemExit(reason)
        device.enable()
        group.register()  # behaves as NCCL does
        return torch.device(LAG)
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()


def be_a_host_of_its_own() -> None:
    """Let NCCL take this rank for one of another host, before it starts: it refuses two ranks of a host on one device.

    The ranks talk over sockets then, as hosts without a faster network do.
    """
    os.environ["NCCL_HOSTID"] = f"host-of-rank-{os.environ.get('RANK', '0')}"


def put(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The model, for `initialize`, which brings it to its device itself but for the lag device: torch refuses
    `param.data = view` from the CPU there."""
    return model.to(LAG) if name == LAG else model


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Let engines that are made inside compute on the CPU."""
    before = os.environ.get("ACCELERATE_USE_CPU")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["ACCELERATE_USE_CPU"]
        else:
            os.environ["ACCELERATE_USE_CPU"] = before


def allocated() -> int:
    """The bytes of tensors on the device, without garbage."""
    for _ in range(3):  # a thread, or an object that had to go first, may hold things at the first
        gc.collect()
    torch.accelerator.synchronize()
    return int(torch.accelerator.memory_allocated())


def reports(name: str) -> list[str]:
    """The mistakes that the lag device has found since the last call; none from other devices, which look for none."""
    if name != LAG:
        return []
    from tests.lag import device

    torch.accelerator.synchronize()
    return device.take_reports()


def facts(name: str) -> dict[str, Any]:
    """The facts that a reader has to know of the machine."""
    import transformers

    import hf_zero

    found: dict[str, Any] = {"device": _device_name(name), "driver": _driver(name)}
    found |= {"count": torch.accelerator.device_count(), "torch": torch.__version__}
    return found | {"transformers": transformers.__version__, "hf_zero": _commit() or hf_zero.__version__}


def _device_name(name: str) -> str:
    if name == LAG:
        return "the lag device (a rehearsal without hardware)"
    kind = torch.accelerator.current_accelerator()
    properties = getattr(torch.get_device_module(kind), "get_device_properties", None)
    return str(properties(0).name) if properties is not None else str(kind)


def _driver(name: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        if name != LAG:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    return "not known"


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=_REPOSITORY, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
