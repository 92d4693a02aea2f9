"""Some parameters and all buffers stay fp32 in a bf16 model: parameters by pattern or by the model's own list, and
buffers always.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.slow  # many short ones

HIDDEN, EXPERTS, STEPS = 12, 3, 4
Seen = dict[str, torch.dtype]


class Router(nn.Module):
    """Mixes experts by probabilities that it computes in fp32, and says what it met in forward."""

    _no_split_modules = ("Router",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, HIDDEN, 2) / HIDDEN), persistent=False)
        self.register_buffer("running", torch.full((HIDDEN,), 1 / 3))
        self.register_buffer("num_seen", torch.tensor(3))
        self.seen: Seen = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: tensor.dtype for name, tensor in (*self.named_parameters(), *self.named_buffers())}
        # Exact in fp32 only.
        assert torch.equal(self.inv_freq, 1.0 / 10000 ** (torch.arange(0, HIDDEN, 2) / HIDDEN))
        angle = self.inv_freq.repeat(2).cos() * self.running
        probabilities = self.router(self.norm(x.float() * angle)).softmax(-1)
        mixed = [expert(x) * probabilities[..., index : index + 1] for index, expert in enumerate(self.experts)]
        return x + sum(mixed).to(x.dtype)


class Net(nn.Module):
    def __init__(self, own: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._keep_in_fp32_modules_strict = own  # transformers' convention
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Router() for _ in range(2))
        self.final_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x.to(self.final_norm.weight.dtype)).square().mean()


def build(seed: int, own: tuple[str, ...]) -> Net:
    torch.manual_seed(seed)
    return Net(own)


def start(stage: int, seed: int, patterns: list[str], own: tuple[str, ...]) -> Any:
    model = build(seed, own)
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
        "keep_fp32": patterns,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, index: int) -> float:
    rows = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(index))
    loss = engine(rows.chunk(engine.world_size)[engine.rank])
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def train(stage: int, patterns: list[str], own: tuple[str, ...], folder: str) -> dict[str, Any]:
    engine = start(stage, 0, patterns, own)
    first = [step(engine, index) for index in range(STEPS // 2)]
    seen = [dict(layer.seen) for layer in engine.module.layers]
    state = engine.full_state_dict(keep=True)
    engine.save_checkpoint(folder)
    rest = [step(engine, index) for index in range(STEPS // 2, STEPS)]
    other = start(stage, 1, patterns, own)
    other.load_checkpoint(folder)
    loaded = other.full_state_dict(keep=True)
    again = [step(other, index) for index in range(STEPS // 2, STEPS)]
    return {
        "seen": [*seen, *(dict(layer.seen) for layer in other.module.layers)],
        "losses": first,
        "rest": (rest, again),
        "state": state,
        "loaded": loaded,
    }


WAYS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "patterns": (["*norm*", "*.router.*"], ()),
    "the model's own": (["final_norm.*"], ("norm", "router")),
    "parts of names": (["final_norm.*"], ("layers.*.norm", "router.weight", "router.bias")),
}


@pytest.mark.parametrize("way", WAYS)
def test_in_forward_and_after_resume(way: str, tmp_path: Path) -> None:
    for stage in (2, 3):
        got = run_ranks(train, 2, stage, *WAYS[way], str(tmp_path / str(stage)))[0]
        for seen in got["seen"]:
            for name, dtype in seen.items():
                kept = "norm" in name or "router" in name or name in ("inv_freq", "running")
                want = torch.int64 if name == "num_seen" else torch.float32 if kept else torch.bfloat16
                assert dtype == want, f"stage {stage}: {name} is {dtype} in forward"
        assert got["rest"][0] == got["rest"][1], "a resumed run goes on as if it had not stopped"
        assert len({*got["losses"], *got["rest"][0]}) == STEPS, "vacuous: nothing was learned"
        for name, value in got["state"].items():
            assert got["loaded"][name].dtype == value.dtype and torch.equal(got["loaded"][name], value), name
        router = got["state"]["layers.0.router.weight"]
        assert not torch.equal(router, router.bfloat16().float()), "fp32 has bits that bf16 has not"
        assert torch.equal(got["state"]["layers.0.running"], torch.full((HIDDEN,), 1 / 3))


class Scaled(nn.Module):
    """Adapters beside weights of one byte, integers or floats, that a scale makes numbers of."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        bits = torch.randint(0, 100, (HIDDEN, HIDDEN), dtype=torch.uint8)
        self.packed = nn.Parameter(bits.view(dtype), requires_grad=False)
        self.adapter = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.packed.element_size() == 1
        levels = self.packed.view(torch.uint8).to(x.dtype) / 100
        return (self.adapter(x.to(self.adapter.weight.dtype)) + x @ levels).square().mean()


def train_packed(stage: int) -> list[str]:
    texts = []
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        torch.manual_seed(0)
        model = Scaled(dtype)
        packed, bits = model.packed, model.packed.detach().clone()
        config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.1)
        try:
            engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        except hf_zero.ConfigError as error:
            texts.append(str(error))
            continue
        losses = [step(engine, 0) for _ in range(3)]
        assert losses[2] < losses[0]
        assert model.packed is packed and torch.equal(packed.view(torch.uint8), bits.view(torch.uint8))
    return texts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_packed_parameters_are_left_alone_or_refused(stage: int) -> None:
    for texts in run_ranks(train_packed, 2, stage):
        assert len(texts) == (2 if stage == 3 else 0)
        for text in texts:
            assert "packed is packed" in text and "stage 2" in text
