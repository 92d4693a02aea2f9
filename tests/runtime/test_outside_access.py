"""Weights read outside of their layer's forward: fused losses, penalties, loops over parameters."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

VOCAB, HIDDEN, STEPS = 19, 11, 3
LOSSES = ("head_after", "chunked", "penalty", "penalty_no_grad", "foreign_layer", "two_forwards", "frozen_head")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.borrow = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows)
        for layer in self.layers:
            x = layer(x)
        if self.borrow:  # another layer's weight, in the root's forward
            x = x @ self.layers[0].up.weight
        return x


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy over a few rows at a time that keeps the weight, not the logits (as fused kernels do)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        losses = [F.cross_entropy(h @ weight.T, y, reduction="sum") for h, y in zip(hidden, labels, strict=True)]
        return torch.stack(losses).sum() / labels.numel()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, labels = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for index, (h, y) in enumerate(zip(hidden, labels, strict=True)):
            error = (h @ weight.T).softmax(-1) - F.one_hot(y, VOCAB)
            error *= grads[0] / labels.numel()
            grad_hidden[index] = error @ weight
            grad_weight += error.T @ h
        return grad_hidden, grad_weight, None


def loss_of(kind: str, model: Any, module: Net, rows: torch.Tensor) -> torch.Tensor:
    hidden = model(rows)
    if kind == "chunked":
        loss: torch.Tensor = ChunkedLoss.apply(hidden, module.head.weight, rows)
        return loss
    loss = F.cross_entropy(F.linear(hidden, module.head.weight).flatten(0, 1), rows.flatten())
    if kind == "penalty":
        loss = loss + 0.1 * sum(layer.up.weight.square().sum() + layer.down.weight.norm() for layer in module.layers)
    if kind == "penalty_no_grad":
        with torch.no_grad():
            factor = module.layers[1].up.weight.norm()
        loss = loss * factor
    if kind == "two_forwards":
        loss = loss + model(rows.flip(1)).square().mean() + module.layers[2].up.weight.square().sum()
    return loss


def build(kind: str) -> Net:
    torch.manual_seed(0)
    model = Net().double()
    model.borrow = kind == "foreign_layer"
    model.head.requires_grad_(kind != "frozen_head")
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(step))


def reference(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = loss_of(kind, model, model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def start(kind: str, stage: int) -> Any:
    model = build(kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": zero})[0]


def train(stage: int) -> dict[str, Any]:
    seen = {}
    for kind in LOSSES:
        engine = start(kind, stage)
        losses = []
        for step in range(STEPS):
            loss = loss_of(kind, engine, engine.module, batch(step).chunk(engine.world_size)[engine.rank])
            engine.backward(loss)
            assert not any(unit.on_demand and unit.state.value == "full" for unit in engine.units), kind
            engine.step()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / engine.world_size)
        seen[kind] = (losses, engine.full_state_dict(keep=True))
        engine.teardown()
        assert all(type(module._parameters) is dict for module in engine.module.modules())
    return seen


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_losses_that_read_weights_themselves(stage: int) -> None:
    seen = run_ranks(train, 2, stage)[0]
    for kind in LOSSES:
        losses, weights = reference(kind)
        assert seen[kind][0] == pytest.approx(losses, rel=1e-9), kind
        for name, value in weights.items():
            assert (seen[kind][1][name] - value).abs().max() <= 1e-9 * value.abs().max(), f"{kind}: {name}"


def whole_loop(block: bool, first: bool) -> None:
    """A penalty from a loop over parameters: before the forward (`first`) or after it."""
    engine = start("head_after", 3)
    rows = batch(0).chunk(engine.world_size)[engine.rank]
    dtype = next(engine.module.layers.parameters()).dtype
    assert dtype == torch.float64  # what a loop may ask without values
    with hf_zero.gathered_params(engine.module) if block else contextlib.nullcontext():
        losses = [
            lambda: loss_of("head_after", engine, engine.module, rows),
            lambda: sum(param.square().sum() for param in engine.module.layers.parameters()),
        ]
        engine.backward(sum(loss() for loss in (reversed(losses) if first else losses)))
    grads = {name: hf_zero.full_grad(engine.module, name) for name, _ in engine.module.named_parameters()}
    model = build("head_after")
    want = loss_of("head_after", model, model, batch(0))
    want = want + sum(param.square().sum() for param in model.layers.parameters())
    want.backward()
    for name, param in model.named_parameters():
        got = grads[name]
        assert got is not None and param.grad is not None
        assert torch.allclose(got, param.grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("block", [True, False], ids=["gathered", "sharded"])
def test_a_loop_over_parameters_reads_their_values(block: bool, first: bool) -> None:
    run_ranks(whole_loop, 2, block, first)


def reads_elsewhere() -> None:
    """A read outside of a step is a placeholder, on one rank too: nothing waits for the others."""
    engine = start("head_after", 3)
    if engine.rank == 0:
        assert engine.module.layers[0].up.weight.isnan().all()
    with torch.no_grad():
        engine(batch(0))
    if engine.rank == 0:
        assert engine.module.layers[0].up.weight.isnan().all()


def test_outside_of_a_step_nothing_is_gathered() -> None:
    run_ranks(reads_elsewhere, 2)


class Rootless(nn.Module):
    """All parameters are in units below; the model's own forward reads one of them."""

    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"first": Layer(), "second": Layer()})

    def forward(self, x: torch.Tensor, loop: bool = False) -> torch.Tensor:
        x = self.body["second"](self.body["first"](x)) @ self.body["first"].up.weight
        return x * sum(p.square().sum() for p in self.body["second"].parameters()) if loop else x


def rootless(stage: int, loop: bool) -> tuple[list[float], dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model: Any = Rootless().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = model
    if stage >= 0:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": zero})[0]
    losses = []
    for step in range(STEPS):
        x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = engine(x, loop).square().mean()
        loss.backward()
        engine.step() if stage >= 0 else (optimizer.step(), optimizer.zero_grad())
        losses.append(loss.item())
    if stage < 0:
        return losses, {name: param.detach() for name, param in model.named_parameters()}, 0
    return (
        losses,
        engine.full_state_dict(keep=True),
        sum(order.is_shared for order in engine.params.orders.values()),
    )


def test_a_root_without_parameters() -> None:
    for loop in (False, True):
        losses, params, _ = rootless(-1, loop)
        assert losses[0] != losses[-1]
        for stage in (2, 3):
            for got, values, agreed in run_ranks(rootless, 2, stage, loop):
                assert got == pytest.approx(losses, rel=1e-12)
                for name, value in params.items():
                    torch.testing.assert_close(values[name], value, rtol=0, atol=1e-12, msg=name)
                assert stage < 3 or agreed == 2, "its passes are recorded, so that units are gathered ahead"


class Hidden(nn.Module):
    """Its loss is computed outside, from a weight of the root: a fused linear cross entropy, say."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(5, 5)), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(x)
        return hidden


def backward_again(how: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(weights after a step under stage 3, those of one process): two backwards, each begins in the loss."""
    torch.manual_seed(0)
    plain = Hidden().double()
    model = copy.deepcopy(plain)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

    def two_backwards(called: Any, head: torch.Tensor) -> None:
        losses = [(called(torch.full((2, 5), k, dtype=torch.float64)) @ head).square().mean() for k in (1.0, 2.0)]
        if how == "retained":
            losses = [losses[1], losses[1]]
        losses[1].backward(retain_graph=how == "retained")
        losses[0].backward()

    two_backwards(engine, model.head)
    engine.step()
    two_backwards(plain, plain.head)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    weights = engine.full_state_dict(keep=True)
    assert weights is not None
    return weights, plain.state_dict()


@pytest.mark.parametrize("how", ["reversed", "retained"])
def test_a_second_backward_begins_in_a_loss_that_reads_weights(how: str) -> None:
    for weights, want in run_ranks(backward_again, 2, how):
        for name, value in want.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=1e-12)
