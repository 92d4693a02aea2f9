"""A subclass of a known optimizer counts as that one only if it updates by its code: else it is refused, or asked for.

On shards an optimizer that looks at rows, norms or signs of whole parameters is wrong without any error.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import hf_zero
from hf_zero.optim import Lion
from tests.harness.ranks import run_ranks

STEPS = 3
Weights = dict[str, torch.Tensor]
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def centralize(optimizer: torch.optim.Optimizer) -> None:
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.grad is not None and param.grad.dim() > 1:
            param.grad.sub_(param.grad.mean(dim=1, keepdim=True))


class Centralized(torch.optim.AdamW):
    """The mean over a row is taken out of the gradient."""

    def step(self, closure: Any = None) -> Any:
        centralize(self)
        return super().step(closure)


class Normalised(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                param.grad.div_(param.grad.norm() + 1e-8)
        return super().step(closure)


class Scaling:
    """The class is to be mixed in."""

    def step(self, closure: Any = None) -> Any:
        centralize(self)  # type: ignore[arg-type]
        return super().step(closure)  # type: ignore[misc]


class Mixed(Scaling, torch.optim.SGD):
    pass


class OtherStart(torch.optim.Adam):
    """The first moment starts from the mean gradient of the parameter."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        result = super()._init_group(group, *lists)
        for param in group["params"]:
            if param.grad is not None and self.state[param]["step"] == 0:
                self.state[param]["exp_avg"].fill_(param.grad.mean())
        return result


class Lookahead(torch.optim.Optimizer):
    """A wrapper: every second step goes halfway back."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class OtherLion(Lion):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        centralize(self)
        return super().step(*args, **kwargs)


class OtherAdafactor(torch.optim.Adafactor):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def wrapped(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Patch the optimizer as libraries do: the instance's step is another function, which says it is the old one."""
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    original = optimizer.step

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        centralize(optimizer)
        return original(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def wrapped_and_scheduled(params: Iterable[Any]) -> torch.optim.Optimizer:
    optimizer = Centralized(params, lr=1e-2)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return optimizer


class Decorated(torch.optim.AdamW):
    pass


def _decorated(step: Any) -> Any:
    @functools.wraps(step)
    def inner(self: Any, *args: Any) -> Any:
        centralize(self)
        return step(self, *args)

    return inner


Decorated.step = _decorated(torch.optim.AdamW.step)  # type: ignore[method-assign]
REFUSED: dict[str, tuple[Make, str]] = {
    "centralized": (lambda params: Centralized(params, lr=1e-2), "whose step is not that of AdamW"),
    "normalised": (lambda params: Normalised(params, lr=1e-2), "whose step is not that of SGD"),
    "mixed in": (lambda params: Mixed(params, lr=1e-2), "whose step is not that of SGD"),
    "another start": (lambda params: OtherStart(params, lr=1e-2), "whose _init_group is not that of Adam"),
    "a patched instance": (wrapped, "whose step is not that of AdamW"),
    "under a scheduler": (wrapped_and_scheduled, "whose step is not that of AdamW"),
    "decorated": (lambda params: Decorated(params, lr=1e-2), "whose step is not that of AdamW"),
    "hf_zero's": (lambda params: OtherLion(params, lr=1e-2), "whose step is not that of Lion"),
    "a wrapper": (Lookahead, "Lookahead is not known"),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 37), nn.Tanh(), nn.Linear(37, 53), nn.Tanh(), nn.Linear(53, 3)).double()


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 4, **more}


def plain(make: Make, world: int = 2) -> Weights:
    """One process with torch alone."""
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make(model.parameters())
    for step in range(STEPS):
        torch.stack([model(rows(step, rank)).square().mean() for rank in range(world)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(float((value - before[name]).abs().max()) > 1e-3 for name, value in model.state_dict().items())
    return model.state_dict()


def train(make: Make, settings: dict[str, Any], act: Callable[[Any], Any] | None = None) -> Weights:
    model = build()
    engine = hf_zero.initialize(model=model, optimizer=make(model.parameters()), config=settings)[0]
    for step in range(STEPS):
        engine.backward(engine(rows(step, dist.get_rank())).square().mean())
        if act is not None:
            act(engine)
        engine.step()
    weights: Weights = engine.full_state_dict(keep=True)
    return weights


def same(got: Weights, want: Weights, where: str, atol: float = 1e-9) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol, msg=f"{where}: {name}")


def errors() -> dict[tuple[str, int], str]:
    found = {}
    for name, (make, _) in REFUSED.items():
        for stage in (1, 2, 3):
            with pytest.raises(hf_zero.ConfigError) as raised:
                train(make, config(stage))
            found[name, stage] = str(raised.value)
    with pytest.raises(hf_zero.ConfigError) as raised:
        train(lambda params: OtherAdafactor(params), config(2, zero_allow_untested_optimizer=True))
    found["Adafactor", 2] = str(raised.value)
    return found


def test_an_update_of_its_own_is_refused_on_every_rank() -> None:
    for found in run_ranks(errors, 2):
        assert "row and column means" in found.pop(("Adafactor", 2))
        for (name, stage), text in found.items():
            assert REFUSED[name][1] in text and "zero_allow_untested_optimizer" in text, (name, stage, text)
            assert "update_full_grads" in text


# ---------------------------------------------------------------- what the message offers
def row_means(gradient: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    return gradient - gradient.mean(dim=1, keepdim=True) if gradient.dim() > 1 else gradient


def on_full_gradients(engine: Any) -> None:
    hf_zero.update_full_grads(engine.module, row_means)


def follow_the_advice() -> dict[str, Weights]:
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    found = {f"stage {stage}": train(adamw, config(stage), on_full_gradients) for stage in (1, 2, 3)}
    return {**found, "stage 0": train(REFUSED["centralized"][0], config(0))}


def test_stage_0_and_full_gradients_give_what_one_process_gives() -> None:
    want = plain(REFUSED["centralized"][0])
    other = plain(functools.partial(torch.optim.AdamW, lr=1e-2))
    assert float((other["0.weight"] - want["0.weight"]).abs().max()) > 1e-3, "vacuous"
    for found in run_ranks(follow_the_advice, 2):
        for where, got in found.items():
            same(got, want, where)


class Unknown(torch.optim.Optimizer):
    """Elementwise, and of no class that is known."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                param.sub_(group["lr"] * torch.atan(30 * param.grad))


class Halved(torch.optim.AdamW):
    """Elementwise, with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                param.grad.mul_(0.5)
        return super().step(closure)


ASKED_FOR: dict[str, Make] = {
    "unknown": functools.partial(Unknown, lr=1e-2),
    "a step of its own": functools.partial(Halved, lr=1e-2),
}


def ask(name: str) -> dict[int, Weights]:
    for stage in (1, 2, 3):
        with pytest.raises(hf_zero.ConfigError, match="set zero_allow_untested_optimizer: true"):
            train(ASKED_FOR[name], config(stage))
    return {stage: train(ASKED_FOR[name], config(stage, zero_allow_untested_optimizer=True)) for stage in (1, 2, 3)}


@pytest.mark.parametrize("name", ASKED_FOR)
def test_the_key_takes_an_elementwise_class_that_is_not_known(name: str) -> None:
    want = plain(ASKED_FOR[name])
    for found in run_ranks(ask, 2, name):
        for stage, got in found.items():
            same(got, want, f"stage {stage}")


# ---------------------------------------------------------------- what changes no update
class Named(torch.optim.AdamW):
    """Other defaults, and groups that are noted."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.noted = 0
        super().__init__(params, lr=1e-2, weight_decay=0.1)

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.noted += 1
        super().add_param_group(group)

    def describe(self) -> str:
        return f"{self.noted} groups"


class First(torch.optim.NAdam):
    """The first instance of its kind: torch puts its wrapper around the step into this class."""


class Rows(transformers.Adafactor):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.02, relative_step=False)


def scheduled(params: Iterable[Any]) -> torch.optim.Optimizer:
    optimizer = Named(params)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)  # torch wraps the instance's step
    return optimizer


TAKEN: dict[str, Make] = {
    "other defaults": Named,
    "the first of its kind": functools.partial(First, lr=1e-2),
    "under a scheduler": scheduled,
    "whole matrices": Rows,
    "maximize, foreach": functools.partial(torch.optim.AdamW, lr=1e-2, maximize=True, foreach=True),
}
NATIVE = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def take(name: str) -> dict[str, Weights]:
    found = {f"stage {stage}": train(TAKEN[name], config(stage)) for stage in (1, 2, 3)}
    if name == "other defaults":
        found["native"] = train(TAKEN[name], config(2, zero_optimization=NATIVE))
    return found


@pytest.mark.parametrize("name", TAKEN)
def test_what_changes_no_update_is_taken(name: str) -> None:
    want = plain(TAKEN[name])
    for found in run_ranks(take, 2, name):
        for where, got in found.items():
            same(got, want, where, atol=1e-6 if where == "native" else 1e-9)


# ---------------------------------------------------------------- hooks
def hooked(stage: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero.optim.sharded").addHandler(handler)

    def make(params: Iterable[Any]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        optimizer.register_step_pre_hook(lambda *args: None)
        return optimizer

    train(make, config(stage))
    return lines


def test_hooks_that_see_ranges_of_elements_are_said() -> None:
    assert run_ranks(hooked, 2, 0) == [[], []]
    first, second = run_ranks(hooked, 2, 1)
    assert "step hooks" in first[0] and second == []
