"""flops_profiler: counts against those of hand and of 6ND, DeepSpeed's text, a run that it does not change."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero
from hf_zero.errors import ConfigError
from tests.harness.ranks import run_ranks

BATCH, TOKENS = 3, 32


def start(model: nn.Module, stage: int, *, accumulation: int = 1, **keys: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "flops_profiler": {"enabled": True, **keys},
    }
    return hf_zero.initialize(model=model, config=config)[0]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Sequential(nn.ReLU(), nn.Linear(16, 4, bias=False)))


def train(engine: Any, steps: int = 3) -> list[float]:
    torch.manual_seed(engine.rank)
    losses = []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(torch.randn(BATCH, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def gpt2(folder: str) -> tuple[str, int]:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": TOKENS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    params = sum(param.numel() for param in model.parameters())
    engine = start(model, 3, output_file=f"{folder}/logs/gpt2", profile_step=0)
    tokens = torch.randint(300, (BATCH, TOKENS))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.teardown()
    return Path(folder, "logs/gpt2").read_text() if engine.rank == 0 else "", params


def profile(folder: str) -> Any:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        losses = []
        for stage in (0, 3):
            for enabled in (True, False):
                engine = start(net(), stage, accumulation=2, enabled=enabled)
                losses.append(train(engine))
                assert not any(module._forward_pre_hooks for module in engine.module[1]) or stage == 3
                engine.teardown()
    Path(folder, "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*file/profile.*Set flops_profiler\.output_file"):
        start(net(), 0, output_file=f"{folder}/file/profile")
    return losses, shown.getvalue(), gpt2(folder)


def number(text: str, line: str) -> float:
    """Behind the name of a line, with its scale."""
    value, scale = re.findall(rf"^{re.escape(line)}: +([\d.]+) ?([KMGT]?)", text, re.MULTILINE)[0]
    return float(value) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[scale]


def test_counts_are_right_and_the_run_is_unchanged(tmp_path: Path) -> None:
    (losses, shown, (text, params)), (_, silent, _) = run_ranks(profile, 2, str(tmp_path))
    plain, off, sharded, sharded_off = losses
    assert plain == off and sharded == sharded_off and plain[0] != plain[-1]
    assert silent.count("flops_profiler") == 0
    assert shown.count("DeepSpeed Flops Profiler") == 2  # of stages 0 and 3
    for one in shown.split("-- DeepSpeed Flops Profiler --")[1:]:
        # A product of [3, 8] and [8, 16] takes 2 * 3 * 8 * 16; backward two of them, but the input needs no gradient
        first, second = 2 * BATCH * 8 * 16, 2 * BATCH * 16 * 4
        assert number(one, "fwd flops per GPU") == pytest.approx(first + second, rel=0.01)
        assert number(one, "bwd flops per GPU") == pytest.approx(first + 2 * second, rel=0.01)
        assert number(one, "params per GPU") == 8 * 16 + 16 * 4
        assert f"(0): Linear(128 = 66.67% Params, {first // 2} MACs = 66.67% MACs, " in one
        assert re.search(rf"\(1\): Sequential\(\n    64 = 33.33% Params, {second // 2} MACs = 33.33% MACs, ", one)
        assert "depth 2:\n    params      - {'Linear': '64'}" in one and "in_features=8" in one
    both = number(text, "fwd flops per GPU") + number(text, "bwd flops per GPU")
    assert both == pytest.approx(6 * params * BATCH * TOKENS, rel=0.05)
