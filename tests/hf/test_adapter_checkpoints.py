"""Checkpoints of adapters are as small as adapters, resume exactly, and never go on from another base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_zero
from tests.harness.at_night import all_at_night
from tests.harness.ranks import run_ranks
from tests.hf import peft_runs
from tests.hf.runs import Outcome, digest

SCRIPTS = ("consolidate.py", "zero_to_fp32.py")


def resume_elsewhere(stage: int, folder: str, feature: str, checkpoint: str) -> list[float] | str:
    """Resume with another base model, made from another seed: the losses, or the error."""
    try:
        return peft_runs.train("subclass", stage, folder, feature, 5, checkpoint).losses
    except hf_zero.CheckpointError as error:
        return str(error)


def train_and_save(*args: Any) -> Outcome:
    results: list[Outcome] = run_ranks(
        peft_runs.train, 2, "subclass", *args, timeout=120, init_group=False, save_strategy="steps", save_steps=3
    )
    return results[0]


def weights_bytes(folder: Path) -> int:
    others = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert max(path.stat().st_size for path in others if path.name not in SCRIPTS) < 40_000, "weights elsewhere"
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("feature", all_at_night(["lora", "dora", "tokens", "pissa", "own"], ("tokens", "pissa")))
def test_checkpoints_hold_adapters_and_resume(feature: str, tmp_path: Path) -> None:
    """PiSSA changes the base, and what is not PEFT's is saved whole by Trainer: their checkpoints are not small."""
    model = peft_runs.with_adapters(feature)
    trainable = sum(param.numel() for param in model.parameters() if param.requires_grad)
    frozen = sum(param.numel() for param in model.parameters() if not param.requires_grad)
    assert 9 * trainable < frozen
    for stage in (3, 2):
        folder = str(tmp_path / f"zero{stage}")
        want = train_and_save(stage, folder, feature)
        size = weights_bytes(Path(folder, "checkpoint-3"))
        limit = {"own": 9 * trainable + frozen, "pissa": 9 * trainable + frozen}.get(feature, 9 * trainable)
        assert size < 4 * limit, f"stage {stage}: {size} bytes for {trainable} trainable parameters"
        again = str(tmp_path / f"again{stage}")
        got = train_and_save(stage, again, feature, 0, f"{folder}/checkpoint-3")
        assert got.losses == want.losses and digest(got.weights) == digest(want.weights)
        other = run_ranks(
            resume_elsewhere,
            2,
            stage,
            again,
            feature,
            f"{folder}/checkpoint-3",
            timeout=120,
            init_group=False,
        )
        for outcome in other:
            if feature in ("own", "pissa"):  # frozen weights are in the folder
                assert outcome == want.losses
            else:
                assert "frozen parameters" in outcome and "other values" in outcome
