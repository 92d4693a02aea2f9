"""DeepSpeed's scripts do these things around `initialize` and zero.Init: a second engine, an engine inside, writes
inside.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from tests.harness.ranks import run_ranks

WIDTH = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.frozen(self.norm(x)).square().mean()


def config(stage: int, **keys: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **keys.pop("zero", {})}
    adam = {"type": "Adam", "params": {"lr": 0.02, "weight_decay": 0.0}}
    return {"train_micro_batch_size_per_gpu": 3, "optimizer": adam, "zero_optimization": zero, **keys}


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def train(engine: Any, first: int, last: int) -> None:
    for number in range(first, last):
        engine.backward(engine(batch(number, engine.rank).to(next(engine.parameters()).dtype)))
        engine.step()


def reference(weights: dict[str, torch.Tensor], *windows: tuple[int, int]) -> dict[str, torch.Tensor]:
    """torch.optim on both ranks' batches, with a new optimizer for each window."""
    model = Net()
    model.load_state_dict(weights)
    for first, last in windows:
        optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.02)
        for number in range(first, last):
            optimizer.zero_grad()
            (sum(model(batch(number, rank)) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------------- a second engine on one model
def twice(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Net()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    old = hf_zero.initialize(model=model, config=first)[0]
    train(old, 0, 3)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    masters = {name: hf_zero.full_optimizer_state(model, "master", name) for name in names}
    engine = hf_zero.initialize(model=old if second.get("over_engine") else model, config=second["config"])[0]
    assert hf_zero.engine_of(model) is engine and engine.module is model
    same = [name for name in names if torch.equal(hf_zero.full_optimizer_state(model, "master", name), masters[name])]
    with pytest.raises(StateError, match="another engine has taken over its model; use what the last"):
        old.step()
    train(engine, 3, 5)
    return {"start": start, "same": same, "names": names, "trained": engine.full_state_dict(keep=True)}


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CHANGES = [
    (config(1), {"config": config(1)}),
    (config(2), {"config": config(3), "over_engine": True}),
    (config(3), {"config": config(0)}),
    (config(3), {"config": config(3, zero={"reduce_bucket_size": 20, "allgather_bucket_size": 20})}),
    (config(3, zero=OFFLOAD), {"config": config(2)}),
    (config(1), {"config": config(3, zero=OFFLOAD)}),
]


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_second_engine_trains_on_where_the_first_was(first: dict[str, Any], second: dict[str, Any]) -> None:
    for found in run_ranks(twice, 2, first, second):
        assert found["same"] == found["names"]
        want = reference(found["start"], (0, 3), (3, 5))
        assert not torch.equal(want["norm.weight"], found["start"]["norm.weight"]), "vacuous: nothing was learned"
        for name, value in want.items():
            torch.testing.assert_close(found["trained"][name], value, rtol=1e-5, atol=1e-6)


BF16 = {"bf16": {"enabled": True}}
CASTS = [
    (config(2, **BF16), {"config": config(2, **BF16)}),
    (config(2, **BF16), {"config": config(3, **BF16)}),
    (config(3, **BF16), {"config": config(1, **BF16)}),
    (config(2, **BF16), {"config": config(2)}),
    (config(3, **BF16), {"config": config(3, zero={"reduce_bucket_size": 20, "allgather_bucket_size": 20}, **BF16)}),
    (config(3, zero=OFFLOAD, **BF16), {"config": config(2, **BF16)}),
]


@pytest.mark.parametrize(("first", "second"), CASTS)
def test_masters_of_16_bit_parameters_go_over_with_all_digits(first: dict[str, Any], second: dict[str, Any]) -> None:
    for found in run_ranks(twice, 2, first, second):
        assert found["same"] == found["names"] and len(found["names"]) == 8


# ---------------------------------------------------------------------- initialize inside sharded_init
def inside(after: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    start = {name: value.clone() for name, value in Net().state_dict().items()}
    torch.manual_seed(3)
    with hf_zero.sharded_init(config(3)):
        model = Net()
        engine = hf_zero.initialize(model=model, config=config(3))[0]
        train(engine, 0, 1)
        other = Net() if after else None
    assert hf_zero.engine_of(model) is engine and engine.trains
    second = hf_zero.engine_of(other) if other is not None else None
    assert (second is not None and second.is_sharded and not second.trains) == after
    train(engine, 1, 3)
    return {"start": start, "trained": engine.full_state_dict(keep=True)}


@pytest.mark.parametrize("after", [False, True])
def test_initialize_inside_sharded_init(after: bool) -> None:
    for found in run_ranks(inside, 2, after):
        want = reference(found["start"], (0, 3))
        assert not torch.equal(want["norm.weight"], found["start"]["norm.weight"])
        for name, value in want.items():
            torch.testing.assert_close(found["trained"][name], value, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- writes in constructors
class Scaled(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class WritesChildren(nn.Module):
    """The init that DeepSpeed's documents show: gather a child's weight, one rank writes."""

    def __init__(self, write_rank: int, replace: bool) -> None:
        super().__init__()
        rank = torch.distributed.get_rank()
        self.children_ = nn.ModuleList(Scaled(nn.Parameter(torch.empty(20, 3))) for _ in range(3))
        self.own = nn.Parameter(torch.zeros(5))
        for number, child in enumerate(self.children_):
            with hf_zero.gathered_params([child.weight, self.own], write_rank=write_rank), torch.no_grad():
                assert child.weight.shape == (20, 3)
                if rank == write_rank:
                    if replace:
                        child.weight.data = torch.full((20, 3), number + 1.0)
                    else:
                        child.weight.fill_(number + 1.0)  # type: ignore[operator]
                    self.own.fill_(number + 10.0)


def writes(write_rank: int, replace: bool) -> list[float]:
    with hf_zero.sharded_init(config(3)):
        model = WritesChildren(write_rank, replace)
    assert all(param.isnan().all() for param in model.parameters())
    with hf_zero.gathered_params(model):
        assert all((param == param.flatten()[0]).all() for param in model.parameters())
        return [float(param.detach().flatten()[0]) for param in model.parameters()]


@pytest.mark.parametrize(("write_rank", "replace"), [(0, False), (1, False), (0, True)])
def test_a_write_inside_a_constructor_is_kept(write_rank: int, replace: bool) -> None:
    assert run_ranks(writes, 2, write_rank, replace) == [[12.0, 1.0, 2.0, 3.0]] * 2


class ReadsAndWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
        with hf_zero.gathered_params(self.layers[0][0].weight), torch.no_grad():
            self.layers[0][0].weight.fill_(1.0)


def reads() -> str:
    with pytest.raises(StateError) as error, hf_zero.sharded_init(config(3)):
        ReadsAndWrites()
    return str(error.value)


def test_a_write_where_all_read_is_an_error() -> None:
    for text in run_ranks(reads, 2):
        assert "wrote to parameter(s) that were gathered for reading" in text and "write_rank=0" in text


# ---------------------------------------------------------------------- the type that parameters are made in
class WithNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.half = nn.Linear(WIDTH, WIDTH, dtype=torch.float16)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def made(given: dict[str, Any], dtype: torch.dtype | None) -> tuple[dict[str, torch.dtype], list[str], list[str]]:
    torch.manual_seed(3)
    plain = WithNorm()
    torch.manual_seed(3)
    lines = _Lines()
    logging.getLogger("hf_zero.engine.sharded_init").addHandler(lines)
    with hf_zero.sharded_init(given, dtype=dtype):
        model = WithNorm()
    kinds = {name: param.dtype for name, param in model.named_parameters()}
    engine = hf_zero.engine_of(model)
    assert engine is not None
    report = engine.memory_report()
    numel = sum(-(-param.numel() // 2) * kinds[name].itemsize for name, param in model.named_parameters())
    assert report["master"] == 0 and numel <= report["parameters"] <= numel + 200
    with hf_zero.gathered_params(model):
        wrong = [
            name
            for (name, mine), want in zip(model.named_parameters(), plain.parameters(), strict=True)
            if not torch.equal(mine, want.to(mine.dtype))
        ]
    return kinds, wrong, lines.lines


@pytest.mark.parametrize(
    ("given", "dtype", "want"),
    [
        (BF16, None, torch.bfloat16),
        ({"fp16": {"enabled": True}}, None, torch.float16),
        ({"bf16": {"enabled": "auto"}}, None, torch.float32),
        (BF16, torch.float32, torch.float32),
        ({}, torch.bfloat16, torch.bfloat16),
        ({"bf16": {"enabled": True}, "keep_fp32": ["layers.1.*"]}, None, torch.bfloat16),
    ],
)
def test_the_configuration_sets_the_type_that_parameters_are_made_in(
    given: dict[str, Any], dtype: torch.dtype | None, want: torch.dtype
) -> None:
    for rank, (kinds, wrong, lines) in enumerate(run_ranks(made, 2, {**config(3), **given}, dtype)):
        assert not wrong
        assert kinds["layers.0.weight"] == kinds["norm.bias"] == kinds["frozen.weight"] == want
        assert kinds["batch.weight"] == torch.float32  # in the type of its running statistics
        assert kinds["layers.1.weight"] == (torch.float32 if "keep_fp32" in given else want)
        cast = any("masters start from the" in line and "keeps all digits" in line for line in lines)
        assert cast == (rank == 0 and want != torch.float32)
