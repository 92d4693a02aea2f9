"""Pinned memory where pages are registered, as for CUDA: calls, refusals, children, and what is forgotten."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.native import pinning
from hf_zero.native.host_memory import PAGE
from hf_zero.native.pinning import HostMemory

GPU = torch.device("cuda", 0)
_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation


class _Cudart:
    """The two calls of CUDA's runtime; `status` is what the next registrations return."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.log: list[str] = []
        self.status = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1, "portable: for every device"
        assert address % PAGE == 0 and nbytes % PAGE == 0
        self.log.append("register")
        if self.status == 0:
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append("unregister")
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Cudart]:
    fake = _Cudart()
    make = torch.zeros
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: fake.log.append(f"wait for {device}"))

    def zeros(*size: int, device: Any = None, **options: Any) -> torch.Tensor:
        if device == GPU:
            fake.log.append("clear the error")
            raise RuntimeError("CUDA error: out of memory")
        return make(*size, device=device, **options)

    monkeypatch.setattr(torch, "zeros", zeros)
    yield fake
    gc.collect()


def test_pages_are_registered_until_they_are_freed_after_a_wait(cudart: _Cudart) -> None:
    memory = HostMemory(GPU, pin=True)
    blocks = [memory.allocate(PAGE + 1), memory.allocate(0), memory.allocate(7)]
    assert [block.numel() for block in blocks] == [2 * PAGE, 0, PAGE]
    assert cudart.registered == {blocks[0].data_ptr(): 2 * PAGE, blocks[2].data_ptr(): PAGE}
    assert memory.pinned_bytes == 3 * PAGE
    cudart.log.clear()
    memory.free(*blocks)
    memory.free(*blocks)
    assert cudart.log == ["wait for cuda:0", "unregister", "unregister"]
    assert cudart.registered == {} and memory.pinned_bytes == 0
    assert not blocks[0].any(), "the pages are there as long as somebody has a view of them"


def test_memory_that_is_forgotten_is_unregistered(cudart: _Cudart) -> None:
    memory, other = HostMemory(GPU, pin=True), HostMemory(GPU, pin=True)
    kept, moved = memory.allocate(1), memory.allocate(1)
    other.adopt(moved, memory)
    del memory
    assert cudart.registered == {moved.data_ptr(): PAGE}
    assert not kept.any()
    del other, moved
    assert cudart.registered == {}


def test_pages_stay_mapped_while_they_are_registered(cudart: _Cudart) -> None:
    """Else the next mapping could get their address, which is registered already, for pages that are gone."""
    memory = HostMemory(GPU, pin=True)
    addresses = {memory.allocate(PAGE).data_ptr() for _ in range(20)}
    assert addresses == set(cudart.registered) and len(addresses) == 20


def test_a_refusal_is_said_once_and_cleared(cudart: _Cudart, caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(GPU, pin=True)
    memory.allocate(PAGE)
    cudart.status = _MEMORY_ALLOCATION
    with caplog.at_level(logging.WARNING):
        blocks = [memory.allocate(PAGE) for _ in range(3)]
    assert len(caplog.records) == 1
    assert f"CUDA error 2; {PAGE} bytes are pinned so far" in caplog.text
    assert cudart.log == ["register", *["register", "clear the error"] * 3]
    assert not any(block.any() for block in blocks)
    memory.free(*blocks)
    assert "unregister" not in cudart.log


def test_a_device_that_failed_is_not_waited_for(cudart: _Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    memory = HostMemory(GPU, pin=True)
    memory.free(memory.allocate(1))
    assert cudart.registered == {}


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux")
def test_pinned_pages_are_not_shared_with_children(cudart: _Cudart) -> None:
    """A write of the parent would get a copy of the page, and the device would go on with the old one."""
    memory = HostMemory(GPU, pin=True)
    assert "dc" in _flags(memory.allocate(PAGE))
    assert "dc" not in _flags(HostMemory(torch.device("cpu"), pin=True).allocate(PAGE)), "vacuous"
    assert "dc" not in _flags(HostMemory(GPU, pin=False).allocate(PAGE))
    cudart.status = _MEMORY_ALLOCATION
    assert "dc" not in _flags(memory.allocate(PAGE)), "it is ordinary memory"


def _flags(block: torch.Tensor) -> list[str]:
    """Return what the kernel says of the mapping of `block`: "dc" is that children do not get it."""
    block.fill_(1)
    found = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            found = start <= block.data_ptr() < end
        elif found and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the block is in no mapping")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows")
@pytest.mark.parametrize("forgets", [False, True])
def test_a_child_does_not_touch_what_its_parent_has_pinned(cudart: _Cudart, forgets: bool) -> None:
    memory = HostMemory(GPU, pin=True)
    block = memory.allocate(PAGE)
    cudart.log.clear()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if forgets:
                del memory
            else:
                memory.free(block)
            code = len(cudart.log)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cudart.registered == {block.data_ptr(): PAGE}


def test_devices_without_copies_pin_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "registrar_of", lambda device: pytest.fail(f"asked for {device}"))
    for name in ("cpu", "meta"):
        memory = HostMemory(torch.device(name), pin=True)
        memory.free(memory.allocate(PAGE))
        assert not memory.pins
