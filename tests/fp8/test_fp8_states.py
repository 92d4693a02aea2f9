"""Adam with states of 8 and 16 bits beside torch's in fp32, and what checkpoints keep of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.checkpoint.folders import read_manifest
from hf_zero.engine.engine import ZeroEngine
from tests.fp8.test_fp8_gradients import make_engine, run_backward, weights
from tests.harness.ranks import run_ranks
from tests.harness.torchao_path import use_torchao

BETAS, EPS, LR, DECAY = (0.9, 0.999), 1e-8, 1e-3, 0.01


def one_layer(kind: Any, **group: Any) -> tuple[nn.Linear, ZeroEngine]:
    use_torchao()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "msamp": {"enabled": True, "opt_level": "O2"},
    }
    optimizer = kind(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **group)
    return model[0], hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


# -------------------------------------------------------------------- the error of twenty steps
def twenty_steps(kind: str, maximize: bool) -> dict[str, Any]:
    layer, engine = one_layer(getattr(torch.optim, kind), maximize=maximize)
    start = layer.weight.detach().double().clone()
    given = []
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        signs = torch.randint(0, 2, layer.weight.shape, generator=generator) * 2 - 1
        given.append(signs * (0.5 + 0.5 * torch.rand(layer.weight.shape, generator=generator)))
        engine.backward((layer.weight * given[-1]).sum())
        engine.step()
    state = {name: hf_zero.full_optimizer_state(layer.weight, name) for name in ("exp_avg", "exp_avg_sq", "master")}
    return {"start": start, "given": given, "weight": layer.weight.detach().clone(), **state}


@pytest.mark.parametrize(("kind", "maximize"), [("AdamW", False), ("Adam", False), ("AdamW", True)])
def test_the_error_of_twenty_steps_is_within_the_sum_of_the_roundings(kind: str, maximize: bool) -> None:
    """The bounds follow the recursion of Adam: each rounding adds at most half a unit of its type."""
    run = run_ranks(twenty_steps, 1, kind, maximize)[0]
    reference = nn.Parameter(run["start"].clone())
    optimizer = getattr(torch.optim, kind)(
        [reference], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, maximize=maximize
    )
    (beta1, beta2), eighth, sixteenth = BETAS, 2.0**-4, 2.0**-11
    # One unit of the smallest numbers that the scale leaves: 2 ** -9 and 2 ** -24 of a largest value of 256 and 32768.
    tiny8, tiny16 = 2.0**-10 / 128, 2.0**-25 / 16384
    w_err = run["start"].abs() * sixteenth
    m_err = v_err = torch.zeros_like(w_err)
    for step, grad in enumerate(run["given"], 1):
        reference.grad = grad.double()
        before = reference.detach().clone()
        optimizer.step()
        state = optimizer.state[reference]
        m, v = state["exp_avg"].abs(), state["exp_avg_sq"]
        g = grad.double().abs() + DECAY * before.abs() * (kind == "Adam")
        g_err = grad.double().abs() * eighth + DECAY * w_err * (kind == "Adam")
        m_err = beta1 * m_err + (1 - beta1) * g_err
        v_err = beta2 * v_err + (1 - beta2) * (2 * g * g_err + g_err.square())
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        least = (v_hat - v_err / (1 - beta2**step)).clamp_min(0).sqrt() + EPS
        assert least.min() > 0.1, "vacuous: the second moment might be zero"
        u_err = m_err / (1 - beta1**step) / least + m_hat * (1 / least - 1 / (v_hat.sqrt() + EPS))
        w_err = w_err * (1 + LR * DECAY) + LR * u_err
        m_err = m_err + (m + m_err) * eighth + tiny8
        v_err = v_err + (v + v_err) * sixteenth + tiny16
        w_err = w_err + (reference.detach().abs() + w_err) * sixteenth + 1e-7
    for name, want, error in (
        ("exp_avg", state["exp_avg"], m_err),
        ("exp_avg_sq", state["exp_avg_sq"], v_err),
        ("master", reference.detach(), w_err),
        ("weight", reference.detach(), w_err),
    ):
        difference = (run[name].double() - want).abs()
        assert (difference <= error).all(), (name, float((difference / error).max()))
        assert difference.max() > 0, f"vacuous: {name} was not rounded"
        assert error.mean() < 0.5 * want.abs().max(), f"vacuous: any {name} would do"
    assert (run["weight"].double() - run["start"]).abs().max() > 10 * LR, "nothing moved"


def quadratic(steps: int) -> tuple[list[float], list[float]]:
    """The distance to the minimum of a quadratic, every hundred steps, and that of torch's AdamW in fp32."""
    layer, engine = one_layer(torch.optim.AdamW)
    torch.manual_seed(1)
    target = torch.randn(layer.weight.shape) * 0.3
    other = nn.Parameter(layer.weight.detach().clone())
    optimizer = torch.optim.AdamW([other], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    ours, theirs = [], []
    for step in range(1, steps + 1):
        for group in (*engine.optimizer.param_groups, *optimizer.param_groups):
            group["lr"] = 5e-3 * (1 - step / (steps + 1))
        engine.backward((layer.weight - target).square().sum() / 2)
        engine.step()
        optimizer.zero_grad()
        ((other - target).square().sum() / 2).backward()
        optimizer.step()
        if step % 100 == 0:
            ours.append((layer.weight - target).norm().item())
            theirs.append((other - target).norm().item())
    return ours, theirs


def test_a_thousand_steps_on_a_quadratic_do_not_drift() -> None:
    ours, theirs = run_ranks(quadratic, 1, 1000, timeout=120)[0]
    assert theirs[-1] < 0.05 * theirs[0], "vacuous: the reference did not converge"
    numel = 32 * 24
    rounding = 2.0**-11 * 0.3 * np.sqrt(numel)  # of the target in fp16
    assert ours[-1] <= theirs[-1] + 4 * rounding, (ours, theirs)
    assert ours[-1] <= min(ours) * 1.5 + rounding, "it drifted away from where it was"


# -------------------------------------------------------------------- checkpoints
def go_on(folder: str, save: bool, level: str, stage: int, **more: Any) -> dict[str, Any]:
    model, engine = make_engine(level, stage, **more)
    data = torch.randn(12, 8, 24, generator=torch.Generator().manual_seed(5))

    def steps(first: int, last: int) -> None:
        for batch in data[first:last]:
            engine.backward((engine(batch) - batch[:, :16]).square().mean())
            engine.step()

    if save:
        steps(0, 6)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        engine.save_checkpoint(f"{folder}/again-{level}{stage}-{engine.world_size}")
    middle = {name: param.detach().clone() for name, param in model.named_parameters()}
    first = hf_zero.full_optimizer_state(weights(model)[0], "exp_avg")
    steps(6, 12)
    end = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {
        "middle": middle,
        "end": end,
        "first": first,
        "count": hf_zero.full_optimizer_state(weights(model)[0], "step"),
    }


def test_a_run_goes_on_bit_for_bit_and_others_with_the_same_values(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    whole = run_ranks(go_on, 2, folder, True, "O3", 2)[0]
    assert any(not torch.equal(whole["middle"][name], end) for name, end in whole["end"].items())
    for world_size, level, stage in ((2, "O3", 2), (2, "O3", 1), (2, "O2", 0), (1, "O2", 0)):
        resumed = run_ranks(go_on, world_size, folder, False, level, stage)[0]
        assert torch.equal(resumed["first"], whole["first"]) and resumed["count"] == 12
        for name, want in whole["end"].items():
            assert torch.equal(resumed["end"][name], want), (name, world_size, level, stage)
    for world_size, level, stage in ((3, "O3", 2), (2, "", 3), (2, "O1", 1), (1, "", 0)):
        resumed = run_ranks(go_on, world_size, folder, False, level, stage)[0]
        assert torch.equal(resumed["first"], whole["first"])
        for name, want in whole["end"].items():
            torch.testing.assert_close(resumed["end"][name], want, rtol=0, atol=0.03)
    _look_at_files(tmp_path / "saved")


def _look_at_files(folder: Path) -> None:
    manifest = read_manifest(folder / "global_step6")
    assert manifest.format_version == 4
    assert manifest.kinds["0.weight"] == {"master": "float32", "exp_avg": "float8_e4m3fn", "exp_avg_sq": "float16"}
    scale = manifest.scalars["0.weight"]["exp_avg@scale"]
    assert scale == 2.0 ** round(np.log2(scale))
    stored = [load_file(path) for path in sorted((folder / "global_step6" / "zero").glob("*.safetensors"))]
    moments = [one["0.weight::exp_avg"] for one in stored]
    assert {one.dtype for one in moments} == {torch.float8_e4m3fn} and sum(map(torch.numel, moments)) == 24 * 40


def saved_in_fp32(folder: str, level: str) -> torch.Tensor:
    model, engine = make_engine(level, 1)
    if level:
        engine.load_checkpoint(folder)
        return hf_zero.full_optimizer_state(weights(model)[0], "exp_avg")
    generator = torch.Generator().manual_seed(engine.rank)
    run_backward(model, engine, [torch.randn(one.shape, generator=generator) for one in weights(model)])
    engine.step()
    engine.save_checkpoint(folder)
    return hf_zero.full_optimizer_state(weights(model)[0], "exp_avg")


def test_states_of_fp32_become_small_ones(tmp_path: Path) -> None:
    plain = run_ranks(saved_in_fp32, 2, str(tmp_path), "")[0]
    for world_size in (1, 3):
        small = run_ranks(saved_in_fp32, world_size, str(tmp_path), "O3")
        assert all(torch.equal(mine, small[0]) for mine in small)
        torch.testing.assert_close(small[0], plain, rtol=2.0**-4, atol=float(plain.abs().max()) * 2.0**-17)
        assert not torch.equal(small[0], plain)
