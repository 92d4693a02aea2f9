"""Tests of how many collectives the backend is asked for in a step, and when: on the lag device, which has NCCL's
calls.

With n layers, and counting what the process group was called with:

| stage | forward | backward | step |
|---|---|---|---|
| 3 | n + 1 all-gathers | n all-gathers; a reduce-scatter per unit | one all-gather of what stays unsharded |
| 1, 2 | | a reduce-scatter per unit | one all-gather |
| 0 | | an all-reduce per unit | |

A unit with flat parameters of several types, or frozen ones beside trainable ones, is one unit. So is one that the
sizes of the configuration would cut.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.distributed.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from hf_zero.sharding.unit import UnitKind
from tests.harness.ranks import run_ranks
from tests.lag import device, group

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

STEPS, WORLD = 3, 2
# Llama-3-8B with a 256th of the width and of the vocabulary, and so a 65536th of the elements
HIDDEN, INNER, VOCABULARY, LAYERS = 16, 56, 501, 3
KEY_VALUE = HIDDEN // 4
LIVE, AHEAD = 10**9 // 65536, 5 * 10**7 // 65536  # the defaults
AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
KEYS: dict[str, dict[str, Any]] = {"default": {"stage3_param_persistence_threshold": 0}, "auto": AUTO}
MODELS = ("full", "lora", "norms in fp32")


class Adapted(nn.Module):
    """A frozen matrix and its two adapters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


class Norm(nn.Module):
    """nn.RMSNorm, of operations that are kernels of the device too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight.to(x.dtype)


class Marked(torch.autograd.Function):
    """Nothing, but that its backward is seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.layer.seen.append(f"compute {ctx.layer.number}")
        return grad, None


class Layer(nn.Module):
    """The matrices of a Llama's layer, without the sequence."""

    def __init__(self, number: int, seen: list[str], *, lora: bool) -> None:
        super().__init__()
        self.number, self.seen = number, seen
        sizes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, KEY_VALUE), "v": (HIDDEN, KEY_VALUE), "o": (HIDDEN, HIDDEN)}
        sizes |= {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
        for name, (inputs, outputs) in sizes.items():
            adapted = lora and name in ("q", "v")
            self.add_module(name, Adapted(inputs, outputs) if adapted else nn.Linear(inputs, outputs, bias=False))
        self.input_norm, self.norm = Norm(), Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(f"compute {self.number}")
        h = self.input_norm(x)
        values = (self.k(h) * self.v(h)).repeat(*[1] * (x.dim() - 1), HIDDEN // KEY_VALUE)
        x = x + self.o(self.q(h) * values)
        h = self.norm(x)
        return Marked.apply(x + self.down(nn.functional.silu(self.gate(h)) * self.up(h)), self)  # type: ignore[no-any-return]


class Llama(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self, seen: list[str], *, lora: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(Layer(number, seen, lora=lora) for number in range(LAYERS))
        self.norm = Norm()
        if lora:
            for name, param in self.named_parameters():
                param.requires_grad_(name.endswith(("q.down.weight", "q.up.weight", "v.down.weight", "v.up.weight")))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.roll(1).flatten())


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def _start(
    model: str, stage: int, keys: dict[str, Any], *, place: str = "lag", **more: Any
) -> tuple[ZeroEngine, list[str]]:
    if place == "lag":
        device.enable()
        group.register()
    seen: list[str] = []
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, **keys},
        "bf16": {"enabled": model == "norms in fp32"},
        "keep_fp32": ["*norm.weight"],
        **more,
    }
    return hf_zero.initialize(model=Llama(seen, lora=model == "lora").to(place), config=config)[0], seen


@contextlib.contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Adds what the process group is asked for to `notes`."""
    begin = group.LagGroup._begin

    def noting(self: group.LagGroup, name: str, *arguments: Any) -> group.LagWork:
        notes.append(name)
        return begin(self, name, *arguments)

    with mock.patch.object(group.LagGroup, "_begin", noting):
        yield


def count(model: str, stage: int, keys: dict[str, Any]) -> tuple[list[Counter[str]], list[Counter[str]], bool]:
    """Return for the last step's forward, backward and step: what was called, and what was to be; whether Comm counts
    that.
    """
    engine, _ = _start(model, stage, keys)
    counted: list[Counter[str]] = []
    notes: list[str] = []
    with _noting(notes):
        for step in range(STEPS):
            ids = torch.arange(10, device=engine.device).view(2, 5) + step + engine.rank
            engine.comm.counts.clear()
            counted = []
            loss = engine(ids)
            counted.append(_take(notes))
            engine.backward(loss)
            counted.append(_take(notes))
            engine.step()
            counted.append(_take(notes))
            # A step that counts nothing in its place would pass for one that communicates nothing.
            assert loss.item() > 0
    said = Counter({op: count.calls for op, count in engine.comm.counts.items() if op != "vote"})
    return counted, _expected(engine), said == sum(counted, Counter())


def _take(notes: list[str]) -> Counter[str]:
    taken = Counter(notes)
    notes.clear()
    return taken


def _expected(engine: ZeroEngine) -> list[Counter[str]]:
    trained = [unit for unit in engine.units if any(flat.layout.trainable for flat in unit.flats)]
    stays = any(flat.layout.trainable and not flat.on_demand for unit in engine.units for flat in unit.flats)
    layers = sum(unit.kind is UnitKind.LAYER and unit.on_demand for unit in engine.units)
    roots = sum(unit.kind is UnitKind.ROOT and unit.on_demand for unit in engine.units)
    assert layers == (LAYERS if engine.config.stage == 3 else 0)
    reduce = "reduce_scatter" if engine.config.stage else "all_reduce"
    after = 1 if engine.config.stage and stays else 0
    return [
        Counter(all_gather=layers + roots),
        Counter({"all_gather": layers, reduce: len(trained)}),
        Counter(all_gather=after),
    ]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("model", MODELS)
def test_one_collective_per_unit_and_pass(model: str, keys: str) -> None:
    for stage in range(4):
        for counted, expected, agree in run_ranks(count, WORLD, model, stage, KEYS[keys]):
            assert counted == expected, f"stage {stage}"
            assert agree, f"stage {stage}: Comm.counts"


def losses_of(model: str, stage: int, keys: dict[str, Any], place: str, more: dict[str, Any]) -> list[float]:
    engine, _ = _start(model, stage, keys, place=place, **more)
    losses = []
    for step in range(STEPS):
        ids = torch.arange(10).view(2, 5) + step + engine.rank
        loss = engine(ids.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if place == "lag":
        torch.accelerator.synchronize()
        assert device.take_reports() == []
    return losses


ON_THE_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("schedule", ["late", "random:5"])
@pytest.mark.parametrize("model", MODELS[1:])
def test_units_of_several_flat_parameters_train_as_on_the_cpu(model: str, schedule: str) -> None:
    """Flat parameters that travel together are waited for together, and come from the host by one stream."""
    whole: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
    for stage, keys in ((0, {}), (2, {}), (3, whole), (3, {**whole, **ON_THE_HOST})):
        expected = run_ranks(losses_of, WORLD, model, stage, keys, "cpu", {})
        got = run_ranks(losses_of, WORLD, model, stage, keys, "lag", {}, env={"LAG_SCHEDULE": schedule})
        # Some kernels round otherwise. What is not waited for is NaN.
        rounding = 1e-6 if model == "lora" else 3e-3
        assert got == [pytest.approx(losses, rel=rounding) for losses in expected], (stage, keys)


# A number in the file, and gradients that travel in another type
SMALL: dict[str, Any] = {"reduce_bucket_size": 32, "stage3_param_persistence_threshold": 0}
IN_BF16 = {"communication_data_type": "bf16"}


def count_of_small_buckets(stage: int) -> tuple[Counter[str], list[int]]:
    """Return for a forward and backward: what was called; buckets of each unit."""
    engine, _ = _start("full", stage, SMALL, **IN_BF16)
    notes: list[str] = []
    ids = torch.arange(10, device=engine.device).view(2, 5)
    with _noting(notes):
        engine.backward(engine(ids))
    assert engine.comm.counts["reduce_scatter"].calls == notes.count("reduce_scatter")
    return _take(notes), [sum(flat.layout.num_buckets for flat in unit.flats) for unit in engine.units]


def test_buckets_of_a_unit_travel_together() -> None:
    """All of a gather, and as many of a reduce as may be under way at once."""
    for counted, buckets in run_ranks(count_of_small_buckets, WORLD, 3):
        assert counted["all_gather"] == 2 * LAYERS + 1 and min(buckets) > 8
        assert counted["reduce_scatter"] == sum(-(-number // 8) for number in buckets)
    whole = {**SMALL, "reduce_bucket_size": "auto"}
    for stage in (2, 3):
        cut = run_ranks(losses_of, WORLD, "full", stage, SMALL, "lag", IN_BF16)
        assert cut == run_ranks(losses_of, WORLD, "full", stage, whole, "lag", IN_BF16)


# ---------------------------------------------------------------- when
def order_of_gathers() -> tuple[list[str], list[str], int, int]:
    """Return for the last step's forward and backward: gathers as they were started, and layers as they computed."""
    keys = {"stage3_max_live_parameters": LIVE, "stage3_prefetch_bucket_size": AHEAD}
    engine, seen = _start("full", 3, {"stage3_param_persistence_threshold": 0, **keys})
    begin = Comm._begin

    def noting(self: Comm, call: Any, what: str, *others: Any) -> Any:
        if what.startswith("all-gather of "):
            seen.append(f"gather {what.rpartition('.')[2]}")
        return begin(self, call, what, *others)

    passes: list[list[str]] = []
    with mock.patch.object(Comm, "_begin", noting):
        for step in range(STEPS):
            passes.clear()
            seen.clear()
            loss = engine(torch.arange(10, device=engine.device).view(2, 5) + step)
            passes.append(seen[:])
            seen.clear()
            engine.backward(loss)
            passes.append(seen[:])
            engine.step()
    root, *layers = sorted((unit.numel for unit in engine.units), reverse=True)
    return passes[0], passes[1], root, max(layers)


def test_the_next_layer_is_gathered_before_a_layer_computes() -> None:
    """Though the embeddings and the head alone are more than may be unsharded beside what is in use."""
    for forward, backward, root, layer in run_ranks(order_of_gathers, WORLD):
        assert root > LIVE > layer
        assert forward[-2 * LAYERS :] == [
            *("gather 0", "gather 1", "compute 0"),
            *("gather 2", "compute 1"),
            "compute 2",
        ]
        assert backward == [*("gather 2", "gather 1", "compute 2"), *("gather 0", "compute 1"), "compute 0"]
