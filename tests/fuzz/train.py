"""The training loop of a case, as far as it is the same under hf_zero and in one process.

A `Driver` is what the two do differently: `ranks.EngineDriver` and `reference.PlainDriver`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.fuzz.cases import Case
from tests.fuzz.registry import Batch, make_batch


class Driver(abc.ABC):
    """`run` is called for a forward, `net` is the module itself."""

    run: Any
    net: nn.Module
    case: Case

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor) -> None: ...

    @abc.abstractmethod
    def drop(self, how: str) -> None:
        """Call zero_grad of the "engine", the "optimizer" or the "module"."""

    def loss(self, batch: Batch) -> torch.Tensor:
        return self.case.row.loss(self.run, self.net, batch)


@dataclasses.dataclass
class Trace:
    """A trace holds what one process saw, or one rank."""

    losses: dict[tuple[int, int, int], float] = dataclasses.field(default_factory=dict)  # (step, micro, rank)
    norms: dict[int, float | None] = dataclasses.field(default_factory=dict)  # by step
    weights: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)  # after so many steps
    buffers: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)  # by rank, at the end


# ---------------------------------------------------------------- one micro-batch
Way = Callable[[Driver, Batch], torch.Tensor]


def train_micro(driver: Driver, step: int, micro: int, rank: int) -> float:
    """Forwards and backwards of one micro-batch; returns its loss."""
    batch = make_batch(driver.case.torch_dtype, step, micro, rank)
    return WAYS[driver.case.way](driver, batch).item()


def _other(batch: Batch) -> Batch:
    return dataclasses.replace(batch, x=0.7 * batch.x.flip(0) - 0.1, tokens=batch.tokens.flip(1))


def _engine(driver: Driver, batch: Batch) -> torch.Tensor:
    loss = driver.loss(batch)
    driver.backward(loss)
    return loss


def _direct(driver: Driver, batch: Batch) -> torch.Tensor:
    loss = driver.loss(batch)
    loss.backward()
    return loss


def _retain(driver: Driver, batch: Batch) -> torch.Tensor:
    loss = driver.loss(batch)
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()
    return loss


def _two_losses(driver: Driver, batch: Batch) -> torch.Tensor:
    loss = _engine(driver, batch)
    _engine(driver, _other(batch))
    return loss


def _two_forwards(driver: Driver, batch: Batch) -> torch.Tensor:
    loss = driver.loss(batch)
    driver.backward(loss + 0.3 * driver.loss(_other(batch)))
    return loss


def _reversed(driver: Driver, batch: Batch) -> torch.Tensor:
    first, second = driver.loss(batch), driver.loss(_other(batch))
    second.backward()
    first.backward()
    return first


def _evaluate(driver: Driver, batch: Batch) -> torch.Tensor:
    loss = driver.loss(batch)
    if not driver.case.row.has("buffers"):
        with torch.no_grad():
            driver.loss(_other(batch))
    driver.backward(loss)
    return loss


def _abandon(driver: Driver, batch: Batch) -> torch.Tensor:
    driver.loss(_other(batch))
    return _engine(driver, batch)


def _dropped(how: str) -> Way:
    def train(driver: Driver, batch: Batch) -> torch.Tensor:
        (driver.loss(_other(batch)) * float("nan")).backward()
        driver.drop(how)
        return _engine(driver, batch)

    return train


WAYS: dict[str, Way] = {
    "engine": _engine,
    "direct": _direct,
    "retain": _retain,
    "two losses": _two_losses,
    "two forwards": _two_forwards,
    "reversed": _reversed,
    "evaluate": _evaluate,
    "abandon": _abandon,
    **{f"drop by {how}": _dropped(how) for how in ("engine", "optimizer", "module")},
}


# ---------------------------------------------------------------- what events touch
def floating(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in net.named_parameters() if param.is_floating_point()]


def touched(net: nn.Module, step: int) -> nn.Parameter:
    """The parameter that the events before this step are about."""
    found = [param for _, param in floating(net)]
    return found[(7 * step + 3) % len(found)]


def value_to_set(param: nn.Parameter) -> torch.Tensor:
    return torch.linspace(-0.3, 0.4, param.numel(), dtype=torch.float64).reshape(param.shape).to(param.dtype)


def may_freeze(net: nn.Module, param: nn.Parameter) -> bool:
    """Another trained parameter is left, and this one takes part."""
    return param.requires_grad and sum(p.requires_grad and p.numel() > 1 for p in net.parameters()) > 1


def events_before(case: Case, step: int) -> list[str]:
    return [event for when, event in case.events if when == step]


def copy_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}
