"""One parameter's whole gradient and optimizer state, whatever stage and medium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.slow  # many short ones

MEDIA: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "disk": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme", "max_in_cpu": 0}},
}
CLIP = 0.05


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.single = nn.Parameter(torch.randn(1))  # one rank owns all of it
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.frozen * self.single).square().sum(1).mean()


def build() -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(3)
    model = Net().double()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


Seen = dict[str, dict[str, torch.Tensor | None]]


def reference() -> Seen:
    model, optimizer = build()
    model(rows(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(rows(1)).backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    clipped = {name: p.grad for name, p in model.named_parameters()}
    states: Seen = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        states[kind] = {name: optimizer.state.get(p, {}).get(kind) for name, p in model.named_parameters()}
    return {"grads": grads, "clipped": clipped, **states, "params": dict(model.named_parameters())}


def look(stage: int, medium: dict[str, Any]) -> Seen:
    model, optimizer = build()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **medium}
    config = {"zero_optimization": zero}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    chunk = [rows(step).chunk(engine.world_size)[engine.rank] for step in range(2)]
    engine.backward(engine(chunk[0]))
    engine.step()
    engine.backward(engine(chunk[1]))
    seen: Seen = {}
    seen["grads"] = {name: hf_zero.full_grad(model, name) for name, _ in model.named_parameters()}
    engine.clip_grad_norm_(CLIP)
    seen["clipped"] = {name: hf_zero.full_grad(param) for name, param in model.named_parameters()}
    for kind in ("exp_avg", "exp_avg_sq"):
        seen[kind] = {name: hf_zero.full_optimizer_state(param, kind) for name, param in model.named_parameters()}
    seen["params"] = {name: hf_zero.full_param(param) for name, param in model.named_parameters()}
    with pytest.raises(hf_zero.StateError, match="no optimizer state 'momentum', only exp_avg"):
        hf_zero.full_optimizer_state(model, "momentum", "layers.0.weight")
    engine.step()  # what was looked at is still what the step uses
    seen["after"] = engine.full_state_dict(keep=True)
    return seen


@pytest.mark.parametrize(
    ("stage", "medium"),
    [
        (0, "device"),
        *(pytest.param(1, medium, marks=pytest.mark.slow) for medium in MEDIA),
        *((stage, medium) for stage in (2, 3) for medium in MEDIA),
    ],
)
def test_whole_gradients_and_states(stage: int, medium: str, tmp_path: Path) -> None:
    blocks = {name: {**block, "nvme_path": str(tmp_path)} for name, block in MEDIA[medium].items()}
    if stage < 3:
        blocks.pop("offload_param", None)
    want = reference()
    for seen in run_ranks(look, 2, stage, blocks, timeout=60):
        for what, values in want.items():
            for name, value in values.items():
                got = seen[what][name]
                if value is None:
                    assert got is None, f"{what} of {name}"
                    continue
                assert got is not None and got.shape == value.shape, f"{what} of {name}"
                assert torch.allclose(got, value.detach(), rtol=1e-9, atol=1e-15), f"{what} of {name}"


def alone(stage: int) -> None:
    model, optimizer = build()
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": {"stage": stage}})[0]
    engine.backward(engine(rows(0)))
    if engine.rank == 0:
        with pytest.raises(hf_zero.StateError, match=r"rank\(s\) \[1\] did not"):
            hf_zero.full_grad(model, "layers.0.weight")


def test_on_one_rank_alone_it_raises() -> None:
    run_ranks(alone, 2, 3, timeout=60, timeouts={"presence": 1})


# -------------------------------------------------------------------- setting
W = tuple(f"layers.{number}.weight" for number in range(3))
NEW = {W[0]: 0.25, W[1]: 0.5, "single": 3.0, "unused": 1.25}


def fresh(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype) * NEW[name] + 0.1


def edited_in_one_process() -> dict[str, torch.Tensor]:
    """A parameter before the step, gradients (one that there was none of) and moments before the update."""
    model, optimizer = build()
    named = dict(model.named_parameters())
    model(rows(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        named[W[0]].copy_(fresh(W[0], named[W[0]].shape, torch.float64))
    model(rows(1)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    named[W[1]].grad = fresh(W[1], named[W[1]].shape, torch.float64)
    named["unused"].grad = fresh("unused", named["unused"].shape, torch.float64)
    optimizer.state[named["single"]]["exp_avg"].copy_(fresh("single", named["single"].shape, torch.float64))
    optimizer.state[named[W[2]]]["step"].fill_(7.0)
    nn.utils.clip_grad_norm_(model.parameters(), 2 * CLIP)
    optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def edit(stage: int, medium: dict[str, Any], how: str) -> dict[str, torch.Tensor]:
    """The same under hf_zero, from whole tensors or from each rank's piece."""
    model, optimizer = build()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **medium}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": zero})[0]
    named = dict(model.named_parameters())
    chunk = [rows(step).chunk(engine.world_size)[engine.rank] for step in range(2)]

    def put(what: str, name: str, *kind: str) -> None:
        value = fresh(name, named[name].shape, torch.float64)
        if how == "whole":
            getattr(hf_zero, f"set_full_{what}")(model, *kind, value, name)
            return
        owned = hf_zero.local_param(named[name])
        flat = value.reshape(-1)
        mine = None if owned is None else torch.cat([flat[start:end] for start, end in owned.ranges])
        getattr(hf_zero, f"set_local_{what}")(named[name], *kind, mine)
        again = hf_zero.local_grad(named[name]) if what == "grad" else None
        assert again is None or mine is None or torch.equal(again.values, mine)

    engine.backward(engine(chunk[0]))
    engine.step()
    put("param", W[0])
    engine.backward(engine(chunk[1]))
    engine.clip_grad_norm_(CLIP)
    put("grad", W[1])
    put("grad", "unused")
    put("optimizer_state", "single", "exp_avg")
    hf_zero.set_full_optimizer_state(model, "step", 7.0, W[2])
    seen = hf_zero.full_grad(model, W[1])
    assert seen is not None and torch.allclose(seen, fresh(W[1], seen.shape, seen.dtype), rtol=1e-12)
    norm = engine.clip_grad_norm_(2 * CLIP)
    assert norm > 2 * CLIP, "vacuous: nothing was clipped after the edit"
    engine.step()
    return engine.full_state_dict(keep=True)


@pytest.mark.parametrize("how", ["whole", "local"])
@pytest.mark.parametrize(
    ("stage", "medium"),
    [
        pytest.param(0, "device", marks=pytest.mark.slow),
        *(pytest.param(1, medium, marks=pytest.mark.slow) for medium in MEDIA),
        *(pytest.param(2, medium, marks=pytest.mark.slow) for medium in MEDIA),
        (2, "device"),
        (3, "host"),
        pytest.param(3, "device", marks=pytest.mark.slow),
        pytest.param(3, "disk", marks=pytest.mark.slow),
    ],
)
def test_edits_are_what_the_step_uses(stage: int, medium: str, how: str, tmp_path: Path) -> None:
    blocks = {name: {**block, "nvme_path": str(tmp_path)} for name, block in MEDIA[medium].items()}
    if stage < 3:
        blocks.pop("offload_param", None)
    want = edited_in_one_process()
    plain = dict(build()[0].named_parameters())
    assert all(not torch.equal(want[name], plain[name]) for name in NEW), "vacuous"
    for got in run_ranks(edit, 2, stage, blocks, how, timeout=60):
        for name, value in want.items():
            assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-14), name


def edit_bf16(stage: int, medium: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **medium}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "gradient_clipping": CLIP}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    value = torch.rand(7, 7) + 1e-4
    assert not torch.equal(value.bfloat16().float(), value)
    hf_zero.set_full_param(model, value, W[0])
    hf_zero.set_full_param(model, torch.full((7,), 0.3), "frozen")
    other = hf_zero.full_optimizer_state(model, "master", W[1])
    assert other is not None and not torch.equal(other.bfloat16().float(), other)
    with hf_zero.gathered_params(model, write_rank=1):
        if engine.rank == 1:
            model.layers[1].weight.data[0, 0] = 5.0
    for name, want in ((W[0], value), ("frozen", torch.full((7,), 0.3))):
        assert torch.equal(hf_zero.full_param(model, name), want.bfloat16()), name
    master = hf_zero.full_optimizer_state(model, "master", W[0])
    assert master is not None and torch.equal(master, value) and master.dtype == torch.float32
    # An edit leaves the digits of the masters around it alone.
    after = hf_zero.full_optimizer_state(model, "master", W[1])
    other[0, 0] = 5.0
    assert after is not None and torch.equal(after, other)
    piece = hf_zero.local_param(model, W[0])
    if piece is not None:
        cut = torch.cat([value.reshape(-1)[start:end] for start, end in piece.ranges])
        assert piece.values.dtype == torch.float32 and torch.equal(piece.values, cut)
    loss = engine(rows(0).float().chunk(2)[engine.rank])
    if stage == 3:
        with pytest.raises(hf_zero.StateError, match="between forward and backward"):
            hf_zero.set_full_param(model, value, W[0])
    engine.backward(loss)
    before = hf_zero.full_grad(model, W[2])
    seen: list[str] = []

    def double(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
        seen.append(str(tuple(param.shape)))
        return grad * 2

    hf_zero.update_full_grads(model, double)
    after = hf_zero.full_grad(model, W[2])
    assert before is not None and after is not None and torch.equal(after, before * 2) and before.any()
    assert len(seen) == 7, seen
    engine.step()
    moved = hf_zero.full_optimizer_state(model, "master", W[0])
    assert moved is not None and not torch.equal(moved, value)
    assert torch.equal(hf_zero.full_param(model, W[0]), moved.bfloat16())


@pytest.mark.parametrize(
    ("stage", "medium"),
    [
        (2, "device"),
        (3, "host"),
        *(pytest.param(stage, "device", marks=pytest.mark.slow) for stage in (0, 1, 3)),
        pytest.param(2, "host", marks=pytest.mark.slow),
        pytest.param(3, "disk", marks=pytest.mark.slow),
    ],
)
def test_masters_and_16_bit_copies_are_set_together(stage: int, medium: str, tmp_path: Path) -> None:
    blocks = {name: {**block, "nvme_path": str(tmp_path)} for name, block in MEDIA[medium].items()}
    if stage < 3:
        blocks.pop("offload_param", None)
    run_ranks(edit_bf16, 2, stage, blocks, timeout=60)


def wrong_values() -> None:
    model, optimizer = build()
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": {"stage": 3}})[0]
    good = torch.zeros(7, 7, dtype=torch.float64)
    with pytest.raises(hf_zero.ConfigError, match=r"layers.0.weight has shape \(7, 7\), the value \(7,\)"):
        hf_zero.set_full_param(model, good[0], W[0])
    with pytest.raises(hf_zero.ConfigError, match=r"the value torch\.int64"):
        hf_zero.set_full_param(model, good.long(), W[0])
    with pytest.raises(hf_zero.ConfigError, match=r"rank\(s\) \[1\] passed other values for layers.0.weight"):
        hf_zero.set_full_param(model, good + engine.rank, W[0])
    with pytest.raises(hf_zero.ConfigError, match="rank 1: set_full_grad"):  # on the rank that was right too
        hf_zero.set_full_grad(model, good if engine.rank == 0 else good[0], W[0])
    with pytest.raises(hf_zero.ConfigError, match="is called nobody"):
        hf_zero.set_full_param(model, good, "nobody")
    with pytest.raises(hf_zero.ConfigError, match="set_local_param: this rank owns"):
        hf_zero.set_local_param(model, torch.zeros(1000), W[0])
    with pytest.raises(hf_zero.StateError, match="before the first update"):
        hf_zero.set_full_optimizer_state(model, "exp_avg", good, W[0])
    with pytest.raises(hf_zero.StateError, match="frozen is frozen"):
        hf_zero.set_full_grad(model, good[0], "frozen")
    engine.backward(engine(rows(0).chunk(2)[engine.rank]))
    engine.step()
    with pytest.raises(hf_zero.StateError, match="only exp_avg, exp_avg_sq, master, step"):
        hf_zero.set_full_optimizer_state(model, "momentum", good, W[0])
    with pytest.raises(hf_zero.StateError, match=r"'exp_avg' of layers.0.weight is a tensor of shape \(7, 7\)"):
        hf_zero.set_full_optimizer_state(model, "exp_avg", 1.0, W[0])
    owns = hf_zero.local_param(model, W[0]) is not None
    assert (hf_zero.local_optimizer_state(model, "step", W[0]) is not None) == owns


def test_wrong_values_are_named() -> None:
    run_ranks(wrong_values, 2, timeout=60)
