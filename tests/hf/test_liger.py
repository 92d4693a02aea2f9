"""Liger's fused linear cross entropy, which takes the head's weight outside the head's forward.

Runs where Liger is installed (`pip install --no-deps liger-kernel triton`), without a GPU in Triton's interpreter: it
does Liger's loss, not its other kernels.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest import mock

import pytest

from tests.harness.ranks import run_ranks
from tests.hf.runs import Outcome, train
from tests.hf.test_trl import assert_same

OTHERS = ("cross_entropy", "rope", "rms_norm", "swiglu")
KERNELS = {"fused_linear_cross_entropy": True, **dict.fromkeys(OTHERS, False)}


def train_with_liger(stage: int, folder: str) -> tuple[Outcome, int]:
    from liger_kernel.ops import fused_linear_cross_entropy as module

    forward = module.fused_linear_cross_entropy_forward
    with mock.patch.object(module, "fused_linear_cross_entropy_forward", wraps=forward) as calls:
        outcome = train("subclass", stage, folder, use_liger_kernel=True, liger_kernel_config=KERNELS)
    return outcome, calls.call_count


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="Liger is not installed")
def test_fused_loss_is_that_of_the_plain_model(tmp_path: Path) -> None:
    """Two ranks under hf_zero with Liger, and plain DDP without."""
    want = run_ranks(train, 2, "ddp", 0, str(tmp_path / "ddp"), timeout=120, init_group=False)[0]
    for stage in (1, 3):
        ranks = run_ranks(train_with_liger, 2, stage, str(tmp_path / f"zero{stage}"), timeout=120, init_group=False)
        for outcome, calls in ranks:
            assert calls >= 10, "5 steps of two micro-batches"
            assert_same(want, outcome, f"stage {stage}")
