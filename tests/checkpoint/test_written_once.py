"""A save writes this: every element once, from where it is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.checkpoint.format import zero_folder
from hf_zero.checkpoint.rank_writer import DataWriter
from tests.harness.ranks import run_ranks

WIDTH = 24


def save(stage: int, dtype: torch.dtype, folder: str) -> dict[str, Any]:
    """Save a run with a frozen layer; how many tensors were written, and how many of them from copies."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model[1].requires_grad_(False)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.randn(2, WIDTH, dtype=dtype)).float().square().mean())
    engine.step()
    sharded = engine.optimizer
    held = [tensor for state in sharded.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    held += [master for owned in sharded.owned for master in owned.masters]
    held += [flat.shard.memory for unit in engine.units for flat in unit.flats]
    memories = {tensor.untyped_storage().data_ptr() for tensor in held}
    written, copied = 0, 0
    plain = DataWriter.write

    def write(self: DataWriter, tensor: torch.Tensor) -> None:
        nonlocal written, copied
        written += 1
        copied += tensor.untyped_storage().data_ptr() not in memories
        plain(self, tensor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DataWriter, "write", write)
        engine.save_checkpoint(folder, tag="t")
    pieces = max(len(owned.masters) for owned in sharded.owned)
    engine.teardown()
    return {"written": written, "copied": copied, "pieces": pieces}


@pytest.mark.parametrize(
    "stage, dtype, pieces", [(2, torch.float32, True), (2, torch.bfloat16, False), (3, torch.bfloat16, False)]
)
def test_every_element_is_written_once_and_not_copied_before(
    stage: int, dtype: torch.dtype, pieces: bool, tmp_path: Path
) -> None:
    """16-bit copies of masters are not in the files, frozen weights once, and states are written from where they are.

    Joined before, the states of a slice in several buckets were as much memory again.
    """
    found = run_ranks(save, 2, stage, dtype, str(tmp_path))
    assert all(one["written"] > 10 and one["copied"] == 0 for one in found), found
    assert (max(one["pieces"] for one in found) > 1) is pieces  # a slice of several buckets has several masters
    layer = WIDTH * WIDTH + WIDTH
    data = 0
    for path in zero_folder(tmp_path / "t").glob("*.safetensors"):
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(header))
        entries.pop("__metadata__")
        data += path.stat().st_size - 8 - header
        assert sum(math.prod(one["shape"]) for one in entries.values()) > 0
    assert (
        data == 2 * layer * (4 + 4 + 4) + layer * dtype.itemsize
    )  # masters and two moments of two layers, one frozen
