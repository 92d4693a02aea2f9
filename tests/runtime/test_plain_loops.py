"""Odd programs, which plain torch runs: layers that hand out weights or inner activations, losses that begin there.

Weights after some steps are those of one process that sees the batches of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.slow  # many short ones

WIDTH, STEPS, WORLD = 11, 3, 2
Give = Callable[[Any, torch.Tensor, torch.Tensor], Any]


class Layer(nn.Module):
    """`give(layer, output, inner)` says what it returns."""

    def __init__(self, give: Give) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.give = give

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor] | None = None) -> Any:
        inner = torch.tanh(self.norm(x * self.gain))
        if kept is not None:
            kept.append(inner)
        return self.give(self, x + self.down(torch.tanh(self.up(inner))), inner)


class Net(nn.Module):
    """`take(x, given)` makes the input of the next layer of what a layer returned."""

    _no_split_modules = ("Layer",)

    def __init__(self, give: Give, take: Callable[[torch.Tensor, Any], torch.Tensor], pass_list: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Layer(give) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.take, self.pass_list = take, pass_list

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = x * self.gain, []
        for layer in self.layers:
            x = self.take(x, layer(x, kept) if self.pass_list else layer(x))
        return self.head(x) if not self.pass_list else self.head(sum(kept, torch.zeros(())))


class Box:
    """An object of the script's own, and not the outermost one."""

    def __init__(self, value: torch.Tensor) -> None:
        self.inside = {"value": (value,)}


def plainly(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    return out


def own_parameter(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    return out, layer.up.weight


def own_view(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    return out, layer.up.weight.t().unsqueeze(0)


def own_detached(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    return out, layer.up.weight.detach()


def a_set(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    return {out}


def an_iterator(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    def one() -> Iterator[torch.Tensor]:
        yield out

    return one()


def an_object(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    return [Box(out)]


def an_object_beside(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    return out, [Box(inner)]


def a_distribution(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    return torch.distributions.Independent(torch.distributions.Normal(out, inner.exp()), 1)


def detached(layer: Any, out: torch.Tensor, inner: torch.Tensor) -> Any:
    return out.detach()


def same(x: torch.Tensor, given: Any) -> torch.Tensor:
    result: torch.Tensor = given
    return result


def with_weight(x: torch.Tensor, given: Any) -> torch.Tensor:
    out, weight = given
    return out + torch.tanh(out @ weight.t()) @ weight


def with_view(x: torch.Tensor, given: Any) -> torch.Tensor:
    out, weight = given
    return out + torch.tanh(out @ weight[0]) @ weight[0].t()


def one_of(x: torch.Tensor, given: Any) -> torch.Tensor:
    result: torch.Tensor = next(iter(given))
    return result


def unboxed(x: torch.Tensor, given: Any) -> torch.Tensor:
    result: torch.Tensor = given[0].inside["value"][0]
    return result


def unboxed_beside(x: torch.Tensor, given: Any) -> torch.Tensor:
    """The output itself leads nowhere: backward comes into the layer from inside only."""
    return unboxed(x, given[1])


def drawn(x: torch.Tensor, given: Any) -> torch.Tensor:
    return given.base_dist.loc + torch.tanh(given.log_prob(x.detach()).unsqueeze(-1))


class OwnBackward(torch.autograd.Function):
    """Keeps the graph of a layer to itself, and enters it from inside, as reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer, keep: bool) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            output, inner = _inside(layer.up, layer, ctx.x)
            ctx.inner, ctx.output = inner[:, :WIDTH], output if keep else None
        return ctx.inner.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        with torch.enable_grad():
            result = ctx.inner.exp() + ctx.inner  # nodes that this backward makes come first
        torch.autograd.backward([result], [grad])
        return ctx.x.grad, None, None


class OwnBackwards(Net):
    """The layers' outputs are kept, or not."""

    def __init__(self, keep: bool) -> None:
        super().__init__(plainly, same)
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        for layer in self.layers:
            x = OwnBackward.apply(x, layer, self.keep)
        return self.head(x)


# -------------------------------------------------------------------- losses
def of_output(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    loss: torch.Tensor = run(x).square().mean()
    return loss


def read_before(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    penalty = net.gain.exp().sum() + net.layers[1].up.weight.square().sum()
    return of_output(run, net, x, step) + penalty


def read_before_in_a_loop(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    penalty = sum(param.square().sum() for param in net.parameters())
    return of_output(run, net, x, step) + penalty


def _inside(module: nn.Module, run: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda m, args, out: kept.append(out))
    output = run(x)
    handle.remove()
    return output, kept[0]


def of_inside(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    return _inside(net.layers[1].up, run, x)[1].square().mean()


def of_inside_another_each_step(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    return _inside(net.layers[step % 3].norm, run, x)[1].exp().mean()


def of_inside_and_output(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    output, inner = _inside(net.layers[0].norm, run, x)
    return output.square().mean() + inner.exp().mean()


def by_func_grad(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    loss: torch.Tensor = torch.func.grad(lambda y: run(y).square().sum())(x).square().mean()
    return loss


def by_forces(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    """Return a loss like of_inside, over the gradient of it."""
    x = x.clone().requires_grad_(True)
    (force,) = torch.autograd.grad(_inside(net.layers[1].up, run, x)[1].square().sum(), x, create_graph=True)
    return force.square().mean()


def by_maml(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    named = dict(net.named_parameters())
    grads = torch.autograd.grad(of_output(run, net, x, step), list(named.values()), create_graph=True)
    fast = {name: param - 0.1 * grad for (name, param), grad in zip(named.items(), grads, strict=True)}
    loss: torch.Tensor = torch.func.functional_call(net, fast, (x + 1,)).square().mean()
    return loss


def by_partial_call(run: Any, net: Any, x: torch.Tensor, step: int) -> torch.Tensor:
    """One weight is computed from another, by functional_call too."""
    fast = {"head.weight": net.head.weight * net.gain}
    loss: torch.Tensor = torch.func.functional_call(net, fast, (x,)).square().mean()
    return loss


NETS: dict[str, Callable[[], Net]] = {
    "plainly": functools.partial(Net, plainly, same),
    "own_parameter": functools.partial(Net, own_parameter, with_weight),
    "own_view": functools.partial(Net, own_view, with_view),
    "own_detached": functools.partial(Net, own_detached, with_weight),
    "set": functools.partial(Net, a_set, one_of),
    "iterator": functools.partial(Net, an_iterator, one_of),
    "object": functools.partial(Net, an_object, unboxed),
    "object_beside": functools.partial(Net, an_object_beside, unboxed_beside),
    "distribution": functools.partial(Net, a_distribution, drawn),
    "list_argument": functools.partial(Net, detached, same, True),
    "own_backward": functools.partial(OwnBackwards, False),
    "own_backward_beside": functools.partial(OwnBackwards, True),
}
Loss = Callable[[Any, Any, torch.Tensor, int], torch.Tensor]
CASES: list[tuple[str, Loss]] = [(net, of_output) for net in NETS] + [
    ("plainly", loss)
    for loss in (
        read_before,
        read_before_in_a_loop,
        of_inside,
        of_inside_another_each_step,
        of_inside_and_output,
        by_func_grad,
        by_forces,
        by_maml,
        by_partial_call,
    )
]


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def build(net: str) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = NETS[net]().double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, dtype=param.dtype) * 0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@functools.cache
def in_one_process(net: str, loss_of: Loss) -> dict[str, torch.Tensor]:
    model, optimizer = build(net)
    for step in range(STEPS):
        for rank in range(WORLD):
            (loss_of(model, model, batch(step, rank), step) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def train_all(zero: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    return [train(net, loss_of, zero) for net, loss_of in CASES]


def train(net: str, loss_of: Loss, zero: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, optimizer = build(net)
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0, **zero}}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(STEPS):
        loss = loss_of(engine, model, batch(step, engine.rank), step)
        if step % 2:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
    assert not any(unit.on_demand and unit.state.value == "unsharded" for unit in engine.units)
    return engine.full_state_dict(keep=True)


ZEROS = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "overlap_comm": False}]


@pytest.fixture(scope="module", params=ZEROS, ids=["1", "2", "3", "3-no-prefetch"])
def trained(request: pytest.FixtureRequest) -> list[list[dict[str, torch.Tensor]]]:
    """Return by rank the weights of every case. The first case that raises fails all of them."""
    return run_ranks(train_all, WORLD, request.param, timeout=120)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{net}-{loss.__name__}" for net, loss in CASES])
def test_it_trains_as_one_process_does(case: int, trained: list[list[dict[str, torch.Tensor]]]) -> None:
    net, loss_of = CASES[case]
    want = in_one_process(net, loss_of)
    start = dict(build(net)[0].named_parameters())
    for got in (of_rank[case] for of_rank in trained):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-12, msg=name)
        moved = [name for name, value in got.items() if not torch.equal(value, start[name])]
        assert len(moved) >= 3, moved


def backward_in_another_thread() -> str:
    model, optimizer = build("own_backward")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": zero})[0]
    loss = of_output(engine, model, batch(0, engine.rank), 0)
    with ThreadPoolExecutor(1) as pool, pytest.raises(hf_zero.StateError) as caught:
        pool.submit(loss.backward).result()
    return str(caught.value)


def test_a_weight_that_backward_cannot_find_is_an_error_that_names_the_layers() -> None:
    """There autograd numbers nodes anew, and the graph that a function keeps to itself cannot be looked through."""
    for text in run_ranks(backward_in_another_thread, WORLD):
        assert "layers.0, layers.1, layers.2 (3 in all)" in text and "in the thread of the forward" in text, text
