"""Settings of the test session: one thread per process, the fork server ended at the end."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch asks the name server for the name of 127.0.0.1 at every connection to a store: an answer that is lost costs the
# resolver's timeout, 5 seconds where nothing else is said.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

from collections.abc import Iterator

import pytest
import torch

from tests.harness import ranks

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: Liger's kernels run without a GPU


@pytest.fixture(autouse=True)
def _leave_the_process_group() -> Iterator[None]:
    """A test that makes an engine in this process joins a group of one; the next test must not find it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def _end_fork_server() -> Iterator[None]:
    yield
    ranks.close()
