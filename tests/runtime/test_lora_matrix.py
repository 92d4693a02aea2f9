"""LoRA, frozen norms and full fine-tuning under activation checkpointing give one process's gradients and weights.

Adapters come from PEFT or are made by hand: what counts is `requires_grad`, not a class.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from tests.harness.ranks import run_ranks

WORLD, STEPS, VOCAB = 2, 2, 29
KINDS = ("lora", "own_lora", "frozen_norms", "full")
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "params": {"offload_param": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


@dataclasses.dataclass(frozen=True)
class Setup:
    stage: int
    kind: str
    reentrant: bool
    offload: str = "none"
    passes: str = "one"  # of a step, as in contrastive and odds-ratio losses: see `backward`
    group: int | str = "all"  # sharding_group

    @property
    def dtype(self) -> torch.dtype:
        # The native rule of offloaded updates computes in fp32.
        return torch.float32 if self.offload in ("optimizer", "both") else torch.float64


class OwnLora(nn.Module):
    """A frozen linear layer with trainable factors beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


def build(setup: Setup) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=20,
        intermediate_size=26,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        use_cache=False,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config)
    if setup.kind == "lora":
        lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    elif setup.kind == "own_lora":
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = OwnLora(layer.self_attn.q_proj, 3)
            layer.mlp.down_proj = OwnLora(layer.mlp.down_proj, 3)
    elif setup.kind == "frozen_norms":
        for name, param in model.named_parameters():
            param.requires_grad_("norm" not in name)
    model.to(setup.dtype)
    # Trainer does this: without inputs that need a gradient a reentrant checkpoint has no backward.
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": setup.reentrant})
    return model.train()


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 7), generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Adam divides by the root of gradients: a larger epsilon keeps rounding noise from being amplified.
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=rows, labels=rows).loss
    return loss


def backward(setup: Setup, model: Any, rows: torch.Tensor) -> None:
    """One or two forwards of the model, under one loss or two."""
    if setup.passes == "one":
        loss_of(model, rows).backward()
    elif setup.passes == "two forwards":
        (loss_of(model, rows) - 0.3 * loss_of(model, rows.flip(1))).backward()
    else:
        loss_of(model, rows).backward()
        (-0.3 * loss_of(model, rows.flip(1))).backward()


Seen = dict[str, torch.Tensor]


def reference(setup: Setup) -> tuple[list[Seen], Seen, Seen]:
    """(gradients of every step, parameters after and before training), in one process on the whole batch."""
    model = build(setup)
    start = {
        name: param.detach().clone().requires_grad_(param.requires_grad) for name, param in model.named_parameters()
    }
    optimizer = optimizer_of(model)
    grads = []
    for step in range(STEPS):
        backward(setup, model, batch(step))
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return grads, {name: param.detach().clone() for name, param in model.named_parameters()}, start


_REFERENCES: dict[tuple[Any, ...], tuple[list[Seen], Seen, Seen]] = {}


def train(setups: list[Setup]) -> list[tuple[list[Seen], Seen]]:
    return [train_one(setup) for setup in setups]


def train_one(setup: Setup) -> tuple[list[Seen], Seen]:
    model = build(setup)
    zero = {"stage": setup.stage, "stage3_param_persistence_threshold": 0, "sharding_group": setup.group}
    zero |= OFFLOADS[setup.offload]
    engine = hf_zero.initialize(model=model, optimizer=optimizer_of(model), config={"zero_optimization": zero})[0]
    steps = []
    for step in range(STEPS):
        backward(setup, engine, batch(step).chunk(engine.world_size)[engine.rank])
        grads = {name: hf_zero.full_grad(model, name) for name, p in model.named_parameters() if p.requires_grad}
        steps.append({name: grad for name, grad in grads.items() if grad is not None})
        engine.step()
    state = engine.full_state_dict(keep=True)
    engine.teardown()
    return steps, {name: state[name] for name, _ in model.named_parameters()}


def assert_same(setup: Setup, got: tuple[list[Seen], Seen]) -> None:
    key = (setup.kind, setup.reentrant, setup.passes, setup.dtype)  # all that it depends on
    if key not in _REFERENCES:
        _REFERENCES[key] = reference(setup)
    want_grads, want, start = _REFERENCES[key]
    relative = 1e-9 if setup.dtype == torch.float64 else 2e-5
    for step in range(STEPS):
        assert got[0][step].keys() == want_grads[step].keys(), f"{setup}: step {step}"
        largest = max(grad.abs().max().item() for grad in want_grads[step].values())
        for name, grad in want_grads[step].items():
            worst = (got[0][step][name] - grad).abs().max().item()
            assert worst <= relative * largest, f"{setup}: gradient of {name} in step {step} is off by {worst}"
    for name, value in want.items():
        worst = (got[1][name] - value).abs().max().item()
        assert worst <= relative * (1 + value.abs().max().item()), f"{setup}: {name} is off by {worst}"
        moved = not torch.equal(value, start[name].detach())
        assert moved == start[name].requires_grad, f"vacuous: {name}"
        assert start[name].requires_grad or torch.equal(got[1][name], value), f"{setup}: {name} is frozen and moved"


def assert_all_same(setups: list[Setup], world: int = WORLD) -> None:
    for setup, got in zip(setups, run_ranks(train, world, setups, timeout=120)[0], strict=True):
        assert_same(setup, got)


def test_adapters_at_stage_3() -> None:
    assert_all_same([Setup(3, "lora", False), Setup(3, "own_lora", True)])


@pytest.mark.slow
def test_two_passes_in_a_step() -> None:
    assert_all_same(
        [
            Setup(stage, kind, reentrant, passes=passes)
            for stage in (1, 2, 3)
            for kind, reentrant in (("lora", stage != 2), ("full", stage == 2))
            for passes in ("two forwards", "two backwards")
        ]
    )


@pytest.mark.slow
def test_shards_in_groups() -> None:
    kinds = (("lora", "none"), ("own_lora", "optimizer"), ("frozen_norms", "none"))
    setups = [
        Setup(stage, kind, stage == 2, offload, group=group)
        for stage in (1, 2, 3)
        for group, (kind, offload) in itertools.product((1, 2), kinds)
    ]
    assert_all_same(setups, 4)


@pytest.mark.slow
@pytest.mark.parametrize("crossed", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", KINDS)
def test_matrix(kind: str, crossed: bool) -> None:
    """`crossed`: both ways of checkpointing with every medium; else each medium with one of them."""
    assert_all_same(
        [
            Setup(stage, kind, reentrant, offload)
            for stage in (1, 2, 3)
            for place, offload in enumerate(OFFLOADS if stage == 3 else ("none", "optimizer"))
            for reentrant in ((True, False) if crossed else (place % 2 == stage % 2,))
        ]
    )
