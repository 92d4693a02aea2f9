"""An error on one rank of a pipeline stops all of them, within seconds, with the same sentence."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, StateError
from hf_zero.extras.pipeline.module import PipelineModule
from tests.harness.ranks import RankFailure, run_ranks
from tests.pipeline import models

MICROS = 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICROS,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


class Bad(models.Block):
    """Does something in its third forward, or in the backward of that."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        y = super().forward(x)
        if self.calls != 3:
            return y
        if self.what == "forward":
            raise ValueError("no more")
        if self.what == "dies":
            os._exit(7)
        if self.what == "a set":
            return y, {1, 2}
        if self.what == "70 tensors":
            return [y] * 70
        if self.what == "ends":
            raise StopIteration
        if self.what == "backward":
            y.register_hook(_refuse)
        return y


def _refuse(grad: torch.Tensor) -> None:
    raise ValueError("not this gradient")


def loss_with(bad: str, outputs: torch.Tensor, labels: torch.Tensor) -> Any:
    """Bad from the first micro-batch on."""
    if bad == "loss_fn":
        raise KeyError("labels")
    if bad == "vector":
        return outputs.sum(-1)
    loss = models.loss_of(outputs, labels)
    return {"number": 1.5, "detached": loss.detach()}.get(bad, loss)


def layers_with(bad: str, place: int) -> list[nn.Module]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [spec.build() for spec in models.layers_of("plain")]
    layers[place] = Bad(bad)
    return layers


def data(count: int = 2 * MICROS) -> Iterator[models.Micro]:
    return iter([micro for batch in models.batches(2, 1, MICROS) for micro in batch[0]][:count])


def train_with(bad: str, place: int, stages: int) -> tuple[str, str, float]:
    """Return (kind, text, seconds until it was raised)."""
    began = time.monotonic()
    try:
        train(bad, place, stages)
    except StateError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


def train(bad: str, place: int, stages: int) -> None:
    module = PipelineModule(layers_with(bad, place), num_stages=stages, loss_fn=functools.partial(loss_with, bad))
    engine, *_ = hf_zero.initialize(model=module, config=CONFIG)
    engine.train_batch(data())
    engine.train_batch(data())


def train_with_each(bads: dict[str, tuple[int, str]]) -> dict[str, tuple[str, str, float]]:
    """One engine after another, of two stages: what is torn down after an error leaves room for the next."""
    return {bad: train_with(bad, place, 2) for bad, (place, _) in bads.items()}


@pytest.mark.parametrize(
    ("bad", "place", "stages", "world_size", "told"),
    [
        ("forward", 5, 2, 4, "rank 2, stage 1 of 2, forward of micro-batch 2, layer 5 (Bad): ValueError: no more"),
        ("backward", 1, 3, 3, "rank 0, stage 0 of 3, backward of micro-batch 2, layers 0 to 2: ValueError: not this"),
        (
            "backward",
            5,
            3,
            3,
            "rank 1, stage 1 of 3, backward of input of micro-batch 2, layers 3 to 5: ValueError: not this",
        ),
        (
            "a set",
            3,
            2,
            2,
            "forward of micro-batch 2, output of layer 3 (Bad): a builtins.set cannot be sent",
        ),
    ],
)
def test_all_ranks_raise_what_one_raises(bad: str, place: int, stages: int, world_size: int, told: str) -> None:
    outcomes = run_ranks(train_with, world_size, bad, place, stages, timeout=60)
    for kind, text, seconds in outcomes:
        assert kind == "StateError" and seconds < 10
        # Two pipelines that meet the same error at once tell each its own.
        assert told in text or told.replace("rank 2", "rank 3") in text


# Errors of two stages: where it is -> what is told. "" is the layer's name where nothing is wrong with it.
OF_LAST = "rank 1, stage 1 of 2, forward of micro-batch 0, loss_fn: "
BADS = {
    "loss_fn": (1, OF_LAST + "KeyError: 'labels'"),
    "vector": (1, OF_LAST + "the loss is a tensor of shape (2, 3): expected a tensor with one number"),
    "number": (1, OF_LAST + "the loss is a float: expected a tensor with one number"),
    "detached": (1, OF_LAST + "the loss does not depend on any trainable parameter"),
    "70 tensors": (3, "rank 0, stage 0 of 2, forward of micro-batch 2, output of layer 3 (Bad): 70 tensors cannot be"),
    "ends": (5, "rank 1, stage 1 of 2, forward of micro-batch 2, layer 5 (Bad): StopIteration: "),
}


def test_all_ranks_raise_what_stands_against_an_output_or_a_loss() -> None:
    for found in run_ranks(train_with_each, 2, BADS, timeout=60):
        for bad, (_, told) in BADS.items():
            kind, text, seconds = found[bad]
            assert kind == "StateError" and text.startswith(told) and seconds < 10


def test_a_rank_that_dies_ends_the_others() -> None:
    began = time.monotonic()
    outcomes: list[RankFailure] = run_ranks(train, 3, "dies", 4, 3, timeout=60, expect_error=True)
    assert [outcome.kind for outcome in outcomes] == ["DivergenceError", "Died", "DivergenceError"]
    assert all("did not complete" in outcomes[rank].message for rank in (0, 2))
    assert time.monotonic() - began < 15


def wrong_uses() -> dict[str, str]:
    """Return what this rank was told, by what was wrong. The engine lives on."""
    module = PipelineModule(layers_with("", 1), num_stages=2, loss_fn=models.loss_of)
    engine, *_ = hf_zero.initialize(model=module, config=CONFIG)
    last = engine.is_last_stage()
    told: dict[str, str] = {}

    def note(what: str, call: Any) -> None:
        try:
            call()
            told[what] = "nothing was raised"
        except (StateError, ConfigError, StopIteration) as error:
            told[what] = f"{type(error).__name__}: {error}"

    note("call", lambda: engine(torch.zeros(2, 3, dtype=torch.long)))
    note("backward", lambda: engine.backward(torch.zeros(())))
    note("step", lambda: engine.step())
    note("no_sync", lambda: engine.no_sync())
    note("boundary", lambda: engine.set_gradient_accumulation_boundary(False))
    note("no data", lambda: engine.train_batch())
    note("half a batch", lambda: engine.train_batch(data(4 if last else 2)))
    note("one short", lambda: engine.train_batch(data(MICROS if last else 1)))
    note("end", lambda: engine.train_batch(iter([])))
    note("raises", lambda: engine.train_batch(x / 0 for x in [1]))
    note("a list", lambda: engine.train_batch(list(data())))
    note("no pair", lambda: engine.train_batch(iter([torch.zeros(2)] * MICROS)))
    shifted = [(words + int(last), labels) for words, labels in data()]
    note("values", lambda: engine.train_batch(iter(shifted)))
    longer = [(words[:, : 2 + int(last)], labels) for words, labels in data()]
    note("shapes", lambda: engine.train_batch(iter(longer)))
    note("reduce", lambda: engine.eval_batch(data(), reduce_output="sum"))
    note("mean", lambda: engine.eval_batch(data(), compute_loss=False))
    note("none", lambda: engine.eval_batch(data(), num_micro_batches=0))
    note("again", lambda: hf_zero.initialize(model=module, config=CONFIG))
    for what, block in {
        "stage 2": {"zero_optimization": {"stage": 2}},
        "stage 3": {"zero_optimization": {"stage": 3}},
        "chunks": {"pipeline": {"schedule": "interleaved"}},
        "batch": {"train_batch_size": 7},
    }.items():
        other = PipelineModule(layers_with("", 1), num_stages=2, loss_fn=models.loss_of)
        note(what, functools.partial(hf_zero.initialize, model=other, config={**CONFIG, **block}))
    note("layers", lambda: PipelineModule([*layers_with("", 1), nn.ReLU()][: 8 + last], num_stages=2))
    note("wider", lambda: PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2 + last)], num_stages=2))
    note("seeds", lambda: PipelineModule(layers_with("", 1), num_stages=2, seed_layers=last))
    for what, block in {
        "number": {"gradient_accumulation_steps": MICROS + last},
        "order": {"pipeline": {"schedule": "gpipe" if last else "1f1b"}},
    }.items():
        other = PipelineModule(layers_with("", 1), num_stages=2, loss_fn=models.loss_of)
        note(what, functools.partial(hf_zero.initialize, model=other, config={**CONFIG, **block}))
    other = PipelineModule(layers_with("", 1), num_stages=2, loss_fn=models.loss_of)
    bare = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    untrained, *_ = hf_zero.initialize(model=other, config=bare)
    note("no optimizer", lambda: untrained.train_batch(data()))
    rated = torch.optim.SGD([{"params": list(other.parameters()), "lr": 0.5 if last else 0.25}])
    note("rates", lambda: untrained.attach_optimizer(rated))
    note("sizes", lambda: untrained.eval_batch(data(), num_micro_batches=1 + last))
    told["evaluates"] = f"{untrained.eval_batch(data()).item():.4f} {untrained.module.training}"
    untrained.teardown()
    before = engine.global_steps
    told["trains"] = f"{before} {engine.train_batch(data()).item() > 0} {engine.global_steps}"
    engine.teardown()
    return told


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return run_ranks(wrong_uses, 2, timeout=90)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("call", "StateError: engine(...): a pipeline runs whole batches"),
        ("backward", "Call engine.train_batch(data_iter) instead of forward, backward and step"),
        ("step", "StateError: engine.step: a pipeline runs whole batches"),
        ("no_sync", "StateError: engine.no_sync: a pipeline runs whole batches"),
        ("boundary", "StateError: set_gradient_accumulation_boundary: train_batch updates"),
        ("no data", "no data: give train_batch an iterator, or call engine.set_dataloader first"),
        ("half a batch", "the data iterator ended in the middle of a batch: of 3 micro-batches "),
        ("one short", "there were on rank 0 1."),
        ("end", "StopIteration: "),
        ("raises", "rank 0, stage 0: micro-batch 0 cannot be read: ZeroDivisionError: division by zero"),
        ("a list", "the data is a list: expected an iterator, which goes on where the last batch ended."),
        ("no pair", "it is a Tensor: expected (inputs, labels)"),
        ("values", "micro-batch 0 is another one on rank 1 (stage 1), which takes the labels, than on rank 0"),
        ("shapes", "int64[2, 3], int64[2, 3] instead of int64[2, 2], int64[2, 3]"),
        ("reduce", "ConfigError: eval_batch(reduce_output='sum')"),
        (
            "mean",
            "of one shape: rank 1, stage 1 of 2: float32[1, 3, 16], float32[2, 3, 16].\nreduce_output=None gives",
        ),
        ("none", "ConfigError: eval_batch(num_micro_batches=0): expected a number of at least 1, or None"),
        ("again", "StateError: this model already has a hf_zero engine"),
        ("stage 2", "zero_optimization.stage = 2: a pipeline takes 0 or 1"),
        ("stage 3", "zero_optimization.stage = 3: a pipeline takes 0 or 1"),
        ("chunks", 'pipeline.schedule = "interleaved": it needs pipeline.virtual_stages of 2 or more'),
        ("batch", "ConfigError: "),
        (
            "layers",
            "ConfigError: PipelineModule: the number of layers is 9 on rank 1, and 8 on rank 0.\nAll ranks must",
        ),
        ("wider", "layer 1 is Linear(1.weight[6], 1.bias[3]) on rank 1, and Linear(1.weight[4], 1.bias[2]) on rank 0"),
        ("seeds", "seed_layers is True on rank 1, and False on rank 0"),
        ("number", "configuration of a pipeline: gradient_accumulation_steps is 4 on rank 1, and 3 on rank 0"),
        ("order", "pipeline.schedule is 'gpipe' on rank 1, and '1f1b' on rank 0"),
        (
            "rates",
            "optimizer of a pipeline: lr of parameter group 0 is 0.5 on rank 1, and 0.25 on rank 0",
        ),
        ("sizes", "StateError: rank 1 is at a batch of 2 micro-batches, rank 0 at one of 1"),
        ("no optimizer", "StateError: train_batch: this engine has no optimizer"),
        ("evaluates", " True"),
        ("trains", "0 True 1"),
    ],
)
def test_wrong_uses_are_told_on_every_rank(told: list[dict[str, str]], what: str, text: str) -> None:
    for mine in told:
        assert text in mine[what]
    assert told[0][what] == told[1][what]
