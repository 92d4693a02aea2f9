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


# The files that take longest, in this order and before all others: two workers that share the files end together then.
# By name, wherever they lie.
_LONG = """
    test_operation_order test_parity test_offload_parity test_launched test_optimizers test_precision test_whole_params
    test_fuzz test_documents_language_model test_parity_variants test_entries test_checkpoint_crashes test_launch
    test_estimate_plan test_traps_compile test_lora_matrix test_peft test_recipe_lora test_resume test_stage3_keys
    test_traps test_adapter_checkpoints test_fp16 test_communication_keys test_recipe_zero_inference test_teardown
    test_recipe_zero_offload test_docs test_lost_ranks test_cluster test_traps_misuse test_schedule_runs test_trl
    test_harness test_generation_ranks test_matrix test_gpu_smoke test_multi_gpu_smoke test_offload test_dry_run
""".split()


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays: the collector need not walk it again and again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(_LONG)))


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
