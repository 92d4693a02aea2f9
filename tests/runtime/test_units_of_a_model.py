"""Tests of which parameters form a unit."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.runtime.unit_specs import partition, persistent_parameters
from hf_zero.sharding.model_params import check_parameters
from hf_zero.sharding.unit import UnitKind
from tests.harness.ranks import run_ranks


def names(model: nn.Module, **settings: int) -> dict[str, list[str]]:
    return {spec.name: [name for name, _ in spec.params] for spec in partition(model, **settings)}


def test_persistent_parameters_of_gpt2() -> None:
    """The documents' log line: `Total persistent parameters: 121344 in 98 params` at the default threshold."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    kept = persistent_parameters(model, 100_000)
    assert len(kept) == 98
    assert sum(param.numel() for param in kept.values()) == 121_344
    few = persistent_parameters(model, 100_000, total=10_000)
    assert 0 < sum(param.numel() for param in few.values()) <= 10_000


def test_decoder_layers_are_units_and_the_rest_is_root() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=64, n_positions=16))
    units = names(model)
    assert list(units) == ["transformer.h.0", "transformer.h.1", "transformer.h.2", "root"]
    assert all(name.startswith("transformer.h.1.") for name in units["transformer.h.1"])
    assert "transformer.wte.weight" in units["root"]
    assert "lm_head.weight" not in units["root"], "a tied weight has one place"
    together = [name for members in units.values() for name in members]
    assert sorted(together) == sorted(name for name, _ in model.named_parameters())


def test_small_parameters_stay_whole() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16))
    units = names(model, persistence_threshold=96)
    assert all(dict(model.named_parameters())[name].numel() <= 96 for name in units["persistent"])
    kinds = [spec.kind for spec in partition(model, persistence_threshold=96)]
    assert kinds[-2:] == [UnitKind.ROOT, UnitKind.PERSISTENT]


class Shared(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.own = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


def test_a_parameter_of_two_units_belongs_to_what_holds_both() -> None:
    units = names(Shared())
    assert units == {"a": ["a.bias"], "b": ["b.bias"], "own": ["own.weight", "own.bias"], "root": ["a.weight"]}


def test_the_size_rule_makes_units_of_modules_that_are_called() -> None:
    """No unit is a container, nor a part of MultiheadAttention: their forward never runs."""
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3)),
        nn.ModuleList([nn.MultiheadAttention(128, 4), nn.Linear(128, 512)]),
        nn.Linear(512, 10),
    )
    units = names(model)
    assert {"0.3", "1.0", "1.1"} <= set(units)
    assert not any(name in units for name in ("1", "1.0.out_proj"))
    together = [name for members in units.values() for name in members]
    assert sorted(together) == sorted(name for name, _ in model.named_parameters())


class Layer(nn.Module):
    """The layer of a decoder that knows nothing of transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Decoder(nn.Module):
    def __init__(self, depth: int, container: type[nn.Module]) -> None:
        super().__init__()
        layers = [Layer(256) for _ in range(depth)]
        self.embed, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.layers = nn.ModuleList(layers) if container is nn.ModuleList else container(*layers)


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("depth", [24, 33, 48, 65, 100])
def test_every_layer_of_a_deep_stack_is_a_unit(depth: int, container: type[nn.Module]) -> None:
    """However small a part of the model it is: what is no unit is gathered with all the others, as is a Sequential."""
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": Decoder(depth, container)})
    units = names(model)
    assert {name for name in units if ".layers" in name} == {f"inner.layers.{number}" for number in range(depth)}
    total = sum(param.numel() for param in model.parameters())
    sizes = {spec.name: sum(param.numel() for _, param in spec.params) for spec in partition(model)}
    assert max(sizes.values()) <= total / min(depth, 24)
    together = [name for members in units.values() for name in members]
    assert sorted(together) == sorted(name for name, _ in model.named_parameters())


def test_what_has_no_modules_to_split_it_into_stays_whole() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(1000, 1000))
            self.a, self.b = nn.Linear(200, 200), nn.Linear(200, 200)

    assert names(Own()) == {
        "a": ["a.weight", "a.bias"],
        "b": ["b.weight", "b.bias"],
        "root": ["table"],
    }


def test_compiled_layers_keep_their_plain_names() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16))
    plain = names(model)
    model.transformer.h[0] = torch.compile(model.transformer.h[0], backend="aot_eager")
    assert names(model) == plain


def test_all_parameters_that_cannot_be_cut_are_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    model[0].phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError) as caught:
        check_parameters(model)
    for name in ("1.weight", "1.bias", "0.phase"):
        assert name in str(caught.value)


def say_what_stays_whole(**zero: int) -> str:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=64, n_positions=16))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}}
    logger = logging.getLogger("hf_zero.engine.engine")
    logger.setLevel(logging.INFO)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    return "\n".join(lines)


def test_the_log_says_what_stays_whole() -> None:
    """3 layers of 3072 + 96, 1024 + 32, 4096 + 128, 4096 + 32 and 4 x 32 elements; embeddings; a norm of 2 x 32."""
    small = 3 * (96 + 32 + 128 + 32 + 4 * 32) + 2 * 32
    for zero, numel, count in (
        ({"stage3_param_persistence_threshold": 128}, small, 3 * 8 + 2),
        ({"stage3_param_persistence_threshold": 0}, 0, 0),
        ({"stage3_param_persistence_threshold": 1024}, small + 3 * 1024 + 16 * 32, 3 * 9 + 3),
        ({"stage3_param_persistence_threshold": 128, "stage3_model_persistence_threshold": 40}, 32, 1),
    ):
        told, silent = run_ranks(say_what_stays_whole, 2, **zero)
        assert f"Parameter Offload: Total persistent parameters: {numel} in {count} params" in told, zero
        assert not silent
