"""`hf-zero report`: versions, devices, the native library and what it can do here, for a bug report."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from typing import Any

from hf_zero.checkpoint.format import package_version
from hf_zero.errors import NativeError, ZeroError
from hf_zero.extras.cli.text import format_bytes, print_table
from hf_zero.native.machine import memory_bytes, usable_cores

NAME = "report"
SUMMARY = "show versions, devices and the native library"
EXAMPLES = """
hf-zero report
hf-zero report --json
"""

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "datasets", "peft", "trl")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    facts = {
        "hf_zero": package_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": {"cores": usable_cores(), "memory_bytes": memory_bytes()},
        "torch": _torch_facts(),
        "native_library": _native_library(),
        "io_engine": _io_engine(),
    }
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_facts() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from hf_zero.distributed.unusable_device import unusable_accelerator
    from hf_zero.native.devices import visible_devices

    available = dist.is_available()
    return {
        "built_for": {name: getattr(torch.version, name) for name in _toolkits(torch.version.__all__)},
        "devices": [dataclasses.asdict(device) for device in visible_devices()],
        "problem": " ".join((unusable_accelerator() or "").split()),
        "backends": {
            "gloo": available and dist.is_gloo_available(),
            "nccl": available and dist.is_nccl_available(),
        },
        "threads": torch.get_num_threads(),
    }


def _toolkits(names: Iterable[str]) -> list[str]:
    """Return the names in torch.version that stand for toolkits of accelerators; most have the version None."""
    return [name for name in names if name not in ("__version__", "debug", "git_version")]


def _native_library() -> str | None:
    """The path of the compiled library, or None where it is missing or does not fit."""
    from hf_zero.native.library import library

    try:
        return library()._name
    except NativeError:
        return None


def _io_engine() -> str | None:
    """Return the engine that reads and writes files on this system; None without the library."""
    from hf_zero.native.aio import AioQueue

    try:
        queue = AioQueue()
    except ZeroError:
        return None
    engine = queue.engine
    queue.close()
    return engine


def _print(facts: dict[str, Any]) -> None:
    torch_facts = facts["torch"]
    devices = [
        f"{device['name']}, {format_bytes(device['memory_bytes']) if device['memory_bytes'] else 'memory unknown'}"
        for device in torch_facts["devices"]
    ]
    built_for = [f"{name} {version}" for name, version in torch_facts["built_for"].items() if version]
    print_table(
        [
            ("hf_zero", facts["hf_zero"]),
            ("python", f"{facts['python']} on {facts['platform']}"),
            *((name, version or "not installed") for name, version in facts["packages"].items()),
            ("cpu", f"{facts['cpu']['cores']} cores, {format_bytes(facts['cpu']['memory_bytes'])}"),
            ("torch built for", ", ".join(built_for) or "the CPU"),
            ("devices", "; ".join(devices) or torch_facts["problem"] or "none, training runs on the CPU"),
            ("backends", ", ".join(name for name, there in torch_facts["backends"].items() if there) or "none"),
            ("native library", facts["native_library"] or "missing: a C++ compiler and pip install -e . add it"),
            ("disk i/o", facts["io_engine"] or "not available"),
        ]
    )
