"""fp16 through Trainer and accelerate: the loss is scaled there too, and skipped steps are skipped for schedulers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

import hf_zero
from hf_zero.engine.engine import engine_of
from tests.harness.ranks import run_ranks
from tests.hf.runs import arguments, build, examples, zero_config


def train(stage: int, folder: str, block: dict[str, Any] | None, **more: Any) -> tuple[list[Any], float, int, str]:
    """Return (log history, loss scale, skipped steps, type of the parameters)."""
    config = zero_config(stage) if block is None else zero_config(stage, fp16=block)
    args = hf_zero.TrainingArguments(**arguments(folder, fp16=block is not None, **more), zero=config)
    trainer = hf_zero.Trainer(model=build(), args=args, train_dataset=examples(60, 1))
    trainer.train()
    engine = engine_of(trainer.model)
    dtype = str(next(trainer.model.parameters()).dtype)
    return trainer.state.log_history, engine.optimizer.cur_scale, engine.skipped_steps, dtype


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_trainer_in_fp16_follows_fp32(tmp_path: Path, stage: int) -> None:
    block = {"enabled": "auto", "initial_scale_power": 10}
    half, scale, skipped, dtype = run_ranks(train, 2, stage, str(tmp_path / "half"), block)[0]
    single = run_ranks(train, 2, stage, str(tmp_path / "single"), None)[0][0]
    losses, want = ([entry["loss"] for entry in log if "loss" in entry] for log in (half, single))
    norms, want_norms = ([entry["grad_norm"] for entry in log if "grad_norm" in entry] for log in (half, single))
    assert (scale, skipped, dtype) == (1024, 0, "torch.float16")
    assert losses == pytest.approx(want, rel=1e-2) and losses != want and len(losses) == 5
    assert norms == pytest.approx(want_norms, rel=3e-2)


def test_learning_rate_is_logged_as_zero_while_the_scale_comes_down(tmp_path: Path) -> None:
    block = {"enabled": "auto", "initial_scale_power": 22, "hysteresis": 1}
    log, scale, skipped, _ = run_ranks(train, 2, 2, str(tmp_path), block, max_steps=9, warmup_steps=2)[0]
    rates = [entry["learning_rate"] for entry in log if "learning_rate" in entry]
    norms = [entry["grad_norm"] for entry in log if "grad_norm" in entry]
    first = next(index for index, norm in enumerate(norms) if math.isfinite(norm))  # the first that is applied
    assert 0 < first <= skipped < 7 and scale == 2.0 ** (22 - skipped)
    # The schedule starts there: warm-up from 0, then 0.5, then 1.
    assert rates[: first + 1] == [0.0] * (first + 1)
    assert max(rates) > 0 and min(rate for rate in rates if rate) == pytest.approx(0.5e-2)


def loop(stage: int, mixed_precision: str) -> tuple[list[float], list[bool], list[float], float]:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=mixed_precision)
    config = zero_config(stage, fp16={"enabled": "auto", "initial_scale_power": 19, "hysteresis": 1})
    hf_zero.ZeroPlugin(config).attach(accelerator)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    data = [{key: torch.tensor(value) for key, value in row.items()} for row in examples(64, 1)]
    loader = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, skipped, rates = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if accelerator.sync_gradients:
            skipped.append(accelerator.optimizer_step_was_skipped)
            rates.append(optimizer.param_groups[0]["lr"])
    return losses, skipped, rates, engine_of(model).optimizer.cur_scale


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_accelerate_loop_in_fp16(stage: int) -> None:
    losses, skipped, rates, scale = run_ranks(loop, 2, stage, "fp16")[0]
    want, never, _, one = run_ranks(loop, 2, stage, "no")[0]
    count = sum(skipped)
    assert skipped[0] and 0 < count < len(skipped) - 2
    assert scale == 2.0 ** (19 - count) and not any(never) and one == 1.0
    # accelerate's scheduler moves by one step for each process.
    moves = [2 * sum(not left_out for left_out in skipped[: index + 1]) for index in range(len(skipped))]
    assert rates == pytest.approx([1e-2 * 0.5**move for move in moves])
    assert losses[:2] == pytest.approx(want[:2], rel=1e-2) and losses[-1] < losses[0]
