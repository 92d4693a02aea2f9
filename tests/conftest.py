"""Settings of the test session: one thread per process, the fork server ended at the end."""

from __future__ import annotations

import gc
import os
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch asks the name server for the name of 127.0.0.1 at every connection to a store: an answer that is lost costs the
# resolver's timeout, 5 seconds where nothing else is said.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness import ranks

# A rank that sends wakes another's thread, which must not interrupt it: gloo's thread would find the connection locked
# and ask again until the sender runs on. Half of the time in the kernel is saved. The ranks inherit it.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: Liger's kernels run without a GPU


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays: the collector need not walk it again and again


@pytest.fixture(autouse=True)
def _leave_nothing_in_force() -> Iterator[None]:
    """A test that makes an engine in this process joins a group of one, and TrainingArguments(zero=...) enables: the
    next test must not find either."""
    yield
    if enabled := sys.modules.get("hf_zero.hf.enable"):
        enabled.disable()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """An empty folder for what is offloaded to a disk; `tmp_path` may lie in memory (tests.harness.in_memory)."""
    with tempfile.TemporaryDirectory(prefix="hf-zero-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session", autouse=True)
def _end_fork_server() -> Iterator[None]:
    yield
    ranks.close()
