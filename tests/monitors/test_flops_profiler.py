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
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.extras.monitors.flops_profiler import scaled
from tests.harness.ranks import run_ranks
from tests.hf.runs import arguments, build, examples, zero_config

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
        for stage in range(4):
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


def seconds(text: str, line: str) -> float:
    value, unit = re.findall(rf"^{re.escape(line)}: +([\d.]+) (\w+)", text, re.MULTILINE)[0]
    return float(value) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def test_counts_are_right_and_the_run_is_unchanged(tmp_path: Path) -> None:
    (losses, shown, (text, params)), (_, silent, _) = run_ranks(profile, 2, str(tmp_path))
    assert losses[::2] == losses[1::2] and losses[0][0] != losses[0][-1]
    assert silent.count("flops_profiler") == 0
    assert shown.count("Flops profile of step") == 4  # once for each stage
    for one in shown.split("Flops profile of step")[1:]:
        # A product of [3, 8] and [8, 16] takes 2 * 3 * 8 * 16; backward two of them, but the input needs no gradient
        first, second = 2 * BATCH * 8 * 16, 2 * BATCH * 16 * 4
        assert number(one, "fwd flops per GPU") == pytest.approx(first + second, rel=0.01)
        assert number(one, "bwd flops per GPU") == pytest.approx(first + 2 * second, rel=0.01)
        assert number(one, "params per GPU") == 8 * 16 + 16 * 4
        forward, backward, step = (seconds(one, f"{name} latency") for name in ("fwd", "bwd", "step"))
        whole = seconds(one, "iter latency = fwd + bwd + step / 2")
        assert whole == pytest.approx(forward + backward + step / 2, rel=0.02), "two micro-batches share an update"
        assert number(one, "samples/second") == pytest.approx(2 * BATCH / whole, rel=0.02)
        assert re.search(rf"^0 +{first} +66\.67%$", one, re.MULTILINE)
        assert re.search(rf"^1 +{second} +33\.33%$", one, re.MULTILINE)
        assert f"most fwd flops at depth 1: 0 {first}\nmost fwd flops at depth 2: 1.1 {second}\n" in one
    both = number(text, "fwd flops per GPU") + number(text, "bwd flops per GPU")
    assert both == pytest.approx(6 * params * BATCH * TOKENS, rel=0.05)


# ---------------------------------------------------------------- other loops
def shown_by(run: Any, engine: Any) -> str:
    """Return what a loop prints. It leaves no counter behind."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        run(engine, torch.ones(BATCH, 8))
    engine.teardown()
    assert _get_current_dispatch_mode() is None
    return shown.getvalue()


def two_forwards(engine: Any, x: torch.Tensor) -> None:
    engine.backward((engine(x) + engine(x)).sum())
    engine.step()


def inside_a_mode(engine: Any, x: torch.Tensor) -> None:
    with FlopCounterMode(display=False) as theirs:
        output = engine(x)
    assert _get_current_dispatch_mode() is None and theirs.get_total_flops() > 0
    engine.backward(output.sum())
    assert _get_current_dispatch_mode() is None
    engine.step()


def own_backward(engine: Any, x: torch.Tensor) -> None:
    engine(x).sum().backward()
    engine.step()


def broken_off(engine: Any, x: torch.Tensor) -> None:
    """An error in the forward, and one in the backward; then the step."""
    with pytest.raises(RuntimeError):
        engine(x[:, :3])
    assert _get_current_dispatch_mode() is None
    output = engine(x)
    output.register_hook(lambda gradient: gradient[:0])
    with pytest.raises(RuntimeError):
        engine.backward(output.sum())
    assert _get_current_dispatch_mode() is None


def late(engine: Any, x: torch.Tensor) -> None:
    engine.schedule.restart_at(7, 0)
    engine(x)


def other_loops(folder: str) -> list[str]:
    loops = (two_forwards, inside_a_mode, own_backward, broken_off, late)
    texts = [shown_by(run, start(net(), 2, profile_step=0)) for run in loops]
    given = {"max_steps": 3, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 1, "save_strategy": "no"}
    block = {"flops_profiler": {"enabled": True, "output_file": f"{folder}/trainer"}}
    args = hf_zero.TrainingArguments(**arguments(folder, **given), zero=zero_config(3) | block)
    hf_zero.Trainer(model=build(), args=args, train_dataset=examples(40, 1)).train()
    return [*texts, Path(folder, "trainer").read_text()]


def test_other_loops_are_counted_or_say_why_not(tmp_path: Path) -> None:
    double, inside, own, broken, late_run, trainer = run_ranks(other_loops, 1, str(tmp_path))[0]
    first, second = 2 * BATCH * 8 * 16, 2 * BATCH * 16 * 4
    for text, times in ((double, 2), (inside, 1)):
        assert number(text, "fwd flops per GPU") == pytest.approx(times * (first + second), rel=0.01)
        assert number(text, "bwd flops per GPU") == pytest.approx(times * (first + 2 * second), rel=0.01)
    assert number(own, "fwd flops per GPU") == pytest.approx(first + second, rel=0.01)
    assert len(re.findall(r"^bwd flops per GPU: +unknown: use engine\.backward\(loss\)$", own, re.MULTILINE)) == 1
    assert "Flops profile" not in broken
    assert "no profile, because step 0 (profile_step) is over" in late_run
    assert "iter latency = fwd + bwd + step / 3: " in trainer and "unknown" not in trainer
    whole = scaled(sum(param.numel() for param in build().parameters()))
    assert re.search(rf"^params per GPU: +{whole}\s*$", trainer, re.MULTILINE), "of whole parameters, at stage 3"


WRONG = {
    "enabled": 2,
    "recompute_fwd_factor": -0.5,
    "profile_step": -1,
    "module_depth": -2,
    "top_modules": 0,
    "detailed": "yes",
    "output_file": 3,
    "profile_steps": 1,
}


def test_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError) as raised:
        ZeroConfig.load({"train_micro_batch_size_per_gpu": 1, "flops_profiler": WRONG}).resolve()
    assert all(f"flops_profiler.{name}" in str(raised.value) for name in WRONG)
