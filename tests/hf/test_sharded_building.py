"""from_config and sharded_init: models that are never whole, with the values of a plain build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf.architectures import ARCHITECTURES
from tests.hf.test_sharded_loading import everything, ties

ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
AUTO = {"llama tied": AutoModelForCausalLM, "t5 tied": AutoModelForSeq2SeqLM, "mixtral": AutoModelForCausalLM}
NAMES = ["llama tied", "t5 tied", "mixtral", "llava", "clip", "wav2vec2", "gpt2", "bart", "gemma2", "whisper", "opt"]


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(size, 3 * size)
        self.down = nn.Linear(3 * size, size)
        nn.init.zeros_(self.down.bias)  # of its own child: still whole
        self.scale = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, size: int = 7) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(size) for _ in range(3)))
        self.head = nn.Linear(size, 2)
        self.register_buffer("count", torch.zeros(3))
        nn.init.normal_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def compare(model: nn.Module, plain: nn.Module) -> list[str]:
    engine = hf_zero.engine_of(model)
    assert engine is not None and engine.is_sharded and not engine.trains
    differences = [name for name, param in model.named_parameters() if not param.isnan().all()]
    with hf_zero.gathered_params(model):
        mine = everything(model)
    wanted = everything(plain)
    differences += [name for name in wanted if name not in mine or not torch.equal(mine[name], wanted[name])]
    return differences + ([] if ties(model) == ties(plain) else ["ties"])


def build_configs(names: list[str]) -> dict[str, list[str]]:
    rank = torch.distributed.get_rank()
    outcome = {}
    for name in names:
        config = ARCHITECTURES[name].make().config
        kind = AUTO.get(name, type(ARCHITECTURES[name].make()))
        method = "from_config" if name in AUTO else "_from_config"
        torch.manual_seed(11)
        plain = getattr(kind, method)(config)
        hf_zero.enable(ZERO3)
        torch.manual_seed(11 + rank)
        try:
            outcome[name] = compare(getattr(kind, method)(config), plain)
        finally:
            hf_zero.disable()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_from_config_gives_the_values_of_a_plain_build(world_size: int) -> None:
    for outcome in run_ranks(build_configs, world_size, NAMES, timeout=200):
        assert outcome == {name: [] for name in NAMES}


def build_any(world: int) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(3)
    plain = Net()
    torch.manual_seed(3 + rank)
    with hf_zero.sharded_init(ZERO3):
        model = Net()
        with hf_zero.sharded_init(ZERO3):
            second = nn.Linear(5, 4)
    different = compare(model, plain)
    engine = hf_zero.engine_of(model)
    assert engine is not None
    assert hf_zero.engine_of(second) is not None
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close = torch.allclose(model(x), plain(x), rtol=0, atol=1e-6)
    with pytest.raises(hf_zero.StateError, match="inference only"):
        model(x).sum().backward()
    shards = engine.memory_report()["parameters"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=ZERO3)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for module, step in ((model, trained.step), (plain, reference.step)):
        module(x).square().mean().backward()
        step()
    now = trained.full_state_dict(keep=True)
    worst = max((now[name] - value).abs().max().item() for name, value in plain.state_dict().items())
    return {"different": different, "close": close, "shards": shards, "worst": worst}


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_module_can_be_built_in_shards(world_size: int) -> None:
    whole = sum(param.numel() for param in Net().parameters()) * 4
    for outcome in run_ranks(build_any, world_size, world_size):
        assert outcome["different"] == [] and outcome["close"] and outcome["worst"] < 1e-6
        assert outcome["shards"] < whole / world_size + 300  # of padding


class InitialisesGrandchildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(5)
        self.outer = nn.Sequential(self.inner)
        nn.init.normal_(self.inner.up.weight)


class ZeroesGrandchildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(5)
        self.outer = nn.Sequential(self.inner)
        nn.init.zeros_(self.inner.up.weight)


def build_wrongly(kind: type[nn.Module]) -> None:
    with hf_zero.sharded_init(ZERO3):
        model = kind()
    model.eval()


@pytest.mark.parametrize("kind", [InitialisesGrandchildren, ZeroesGrandchildren])
def test_late_initialisation_is_an_error(kind: type[nn.Module]) -> None:
    for failure in run_ranks(build_wrongly, 2, kind, expect_error=True):
        assert failure.kind == "StateError" and "gathered_params" in failure.message


def build_alone() -> bool:
    with hf_zero.sharded_init(ZERO3):
        model = Net()
    return hf_zero.engine_of(model) is None


def test_one_rank_has_nothing_to_cut() -> None:
    assert run_ranks(build_alone, 1) == [True]
