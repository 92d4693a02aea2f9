"""nvme_path: saved inputs on disk. Losses to the bit, counted bytes, files gone, failures on all ranks."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero
from hf_zero import checkpointing
from hf_zero.config import ZeroConfig
from hf_zero.extras.activations import active
from tests.harness.ranks import run_ranks

LAYERS, STEPS, BYTES = 6, 3, 2 * 8 * 16 * 4  # of a layer's hidden states


def train(block: dict[str, Any], reentrant: bool = False, group: bool = False, breaks: str = "") -> Any:
    """Losses, and reports between forward and backward and after the steps."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_embd=16, n_head=2, vocab_size=40, n_positions=16)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if group:
        active.share_inputs(dist.group.WORLD)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, **block}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    active.share_inputs(None)
    torch.manual_seed(1 + (0 if group else engine.rank))
    losses, reports = [], []
    for step in range(STEPS):
        ids = torch.randint(40, (2, 8))
        loss = engine(input_ids=ids, labels=ids).loss
        reports.append(engine.memory_report())
        if step == 1 and breaks and engine.rank == 1:
            shutil.rmtree(breaks)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    del loss
    reports.append(engine.memory_report())
    files = [path.name for path in Path(breaks or ".").rglob("saved_inputs.swap")] if breaks else []
    engine.teardown()
    assert not breaks or not files
    return losses, reports


def everything(folder: str) -> Any:
    mine = {"activation_checkpointing": {"nvme_path": folder}}
    parts = {"activation_checkpointing": {"nvme_path": folder, "partition_activations": True}}
    results = [train(mine), train(mine, True), train(parts, group=True)]
    assert not checkpointing.is_configured()
    left = [name for _, _, names in os.walk(folder) for name in names]
    dist.barrier()
    return results, [train({}), train({}, True), train({}, group=True)], left if dist.get_rank() == 0 else None


def test_losses_are_those_without_the_block_and_no_file_is_left(tmp_path: Any) -> None:
    for found, expected, _ in run_ranks(everything, 2, str(tmp_path)):
        for (losses, reports), (plain, _) in zip(found, expected, strict=True):
            assert losses == plain and len(set(losses)) == STEPS
            *between, after = reports
            share = 2 if reports is found[2][1] else 1
            assert all(report["saved_inputs_disk"] == LAYERS * BYTES // share for report in between), between
            assert after["saved_inputs_disk"] == 0
            assert after["saved_inputs_disk_peak"] == LAYERS * BYTES // share
            assert after["saved_inputs_host"] == after["saved_inputs_device"] == 0
            counts = [report["saved_inputs_allocations"] for report in reports]
            assert counts[-1] == counts[1] > 0, counts
    assert not list(Path(tmp_path).rglob("*.swap"))


def full(folder: str) -> Any:
    """A disk on which rank 1 may write 16000 bytes: the fourth layer has no room."""
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, resource.RLIM_INFINITY))
    return train({"activation_checkpointing": {"nvme_path": folder}})


def test_a_full_disk_is_an_error_of_all_ranks(tmp_path: Any) -> None:
    for failure in run_ranks(full, 2, str(tmp_path), expect_error=True):
        assert failure.kind == "OffloadError" and "rank 1: " in failure.message, failure
        assert "saved_inputs.swap cannot grow" in failure.message


def removed(folder: str) -> Any:
    return train({"activation_checkpointing": {"nvme_path": folder}}, breaks=folder)


def test_a_folder_that_is_removed_is_an_error_of_all_ranks(tmp_path: Any) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    for failure in run_ranks(removed, 2, str(folder), expect_error=True):
        assert failure.kind == "OffloadError" and "was removed while it was in use" in failure.message, failure
        assert "saved_inputs.swap" in failure.message and "rank " in failure.message


def test_a_folder_that_cannot_be_made_is_an_error_of_all_ranks(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("in the way", encoding="ascii")
    for failure in run_ranks(removed, 2, str(tmp_path / "file"), expect_error=True):
        assert failure.kind == "OffloadError" and "cannot be used" in failure.message, failure
        assert "rank 0" in failure.message and "rank 1" in failure.message


def test_places_that_exclude_each_other_are_refused() -> None:
    for other in ({"cpu_checkpointing": True}, {"activation_memory": "1GB"}):
        keys = {"activation_checkpointing": {"nvme_path": "/tmp", **other}}
        (problem,) = ZeroConfig.load(keys, defer=True).check()
        assert "nvme_path" in str(problem)
