"""Memory of unsharded parameters at stage 3 that somebody keeps beyond the moment in which they were unsharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from tests.harness import traps
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.slow  # many short ones

WIDTH, STEPS = traps.WIDTH, 3
NAME = "blocks.1.up.weight"


def start(**config: Any) -> ZeroEngine:
    torch.manual_seed(4)
    net = traps.Net()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **config.pop("zero", {})}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hf_zero.initialize(model=net, optimizer=optimizer, config={"zero_optimization": zero, **config})[0]


def train(engine: ZeroEngine, step: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + engine.rank), device="cpu")
    engine.backward(traps.mean_square(engine(x.to(engine.device))))
    engine.step()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two have the same values, wherever they are."""
    return torch.equal(one.cpu(), other.cpu())


def weights(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    return engine.full_state_dict(keep=True)


# -------------------------------------------------------------------- out of gathered_params
def out_of_a_block() -> None:
    engine = start()
    model: Any = engine.module
    want = weights(engine)
    with hf_zero.gathered_params(model):
        kept = {
            "state": model.state_dict(),
            "data": {name: param.data for name, param in model.named_parameters()},
            "detached": {name: param.detach() for name, param in model.named_parameters()},
            "views": {name: param.detach().view(-1)[:].view_as(param) for name, param in model.named_parameters()},
        }
        one = model.blocks[1].up.weight.detach().numpy()
    for step in range(STEPS):
        for tensors in kept.values():
            assert all(same(tensors[name].clone(), value) for name, value in want.items()), step
        assert same(torch.from_numpy(one), want[NAME])
        train(engine, step)
    assert not same(weights(engine)[NAME], want[NAME])
    with hf_zero.gathered_params(model):
        assert same(model.blocks[1].up.weight, weights(engine)[NAME])


def test_what_leaves_gathered_params_stays_as_it_was() -> None:
    run_ranks(out_of_a_block, 2)


def by_name_and_written(config: dict[str, Any]) -> None:
    engine = start(**config)
    model: Any = engine.module
    want = weights(engine)[NAME]
    with hf_zero.gathered_params(model, [NAME], write_rank=0), torch.no_grad():
        before = model.blocks[1].up.weight.detach().clone()
        if engine.rank == 0:
            model.blocks[1].up.weight.mul_(2.0)
        kept = model.blocks[1].up.weight.data
    with torch.no_grad(), hf_zero.gathered_params(model.blocks[0]):
        outer = model.blocks[0].up.weight.data
        with hf_zero.gathered_params(model):
            inner = model.head.weight.data
        first, head = outer.clone(), weights(engine)["head.weight"]
    for step in range(STEPS):
        assert same(before, want) and same(kept, 2 * want) and same(outer, first)
        assert same(inner, head)
        train(engine, step)


@pytest.mark.parametrize("config", [{}, {"zero": {"offload_param": {"device": "cpu"}}}], ids=["device", "host"])
def test_after_an_edit_and_from_nested_blocks(config: dict[str, Any]) -> None:
    run_ranks(by_name_and_written, 2, config)


# -------------------------------------------------------------------- out of forward and backward
def keep_in_forward(module: nn.Module, kept: list[Any]) -> Any:
    return module.register_forward_hook(lambda m, args, out: kept.append(m.weight.detach()))


def keep_array(module: nn.Module, kept: list[Any]) -> Any:
    return module.register_forward_hook(lambda m, args, out: kept.append(m.weight.detach().numpy()))


def keep_view_in_graph(module: nn.Module, kept: list[Any]) -> Any:
    def hook(m: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        kept.append(m.weight.t())  # one tensor, which a node saves and the hook keeps
        return out + args[0] @ kept[-1]

    return module.register_forward_hook(hook)


def keep_state(module: nn.Module, kept: list[Any]) -> Any:
    return module.register_forward_hook(lambda m, args, out: kept.append(m.state_dict()["weight"]))


def keep_in_backward(module: nn.Module, kept: list[Any]) -> Any:
    return module.register_full_backward_hook(lambda m, grads, out: kept.append(m.weight.data))


KEEPERS: tuple[Callable[..., Any], ...] = (
    keep_in_forward,
    keep_array,
    keep_view_in_graph,
    keep_state,
    keep_in_backward,
)


def out_of_a_pass(keep: Callable[..., Any], config: dict[str, Any]) -> None:
    engine = start(**config)
    model: Any = engine.module
    kept: list[Any] = []
    keep(model.blocks[1].up, kept)
    want = []
    x = torch.randn(4, WIDTH, device=engine.device)
    for step in range(STEPS):
        now = weights(engine)[NAME]
        if keep is not keep_in_backward:
            with torch.no_grad():
                engine(x)
            abandoned = engine(x)
            want += [now, now]
            del abandoned
        train(engine, step)
        want.append(now)
        assert len(kept) == len(want)
        for mine, value in zip(kept, want, strict=True):
            mine = mine.t() if keep is keep_view_in_graph else torch.as_tensor(mine)
            assert same(mine.detach().clone(), value), (step, keep.__name__)
    assert not same(want[0], want[-1])


@pytest.mark.parametrize("config", [{}, {"zero": {"overlap_comm": False}}], ids=["ahead", "alone"])
@pytest.mark.parametrize("keep", KEEPERS)
def test_what_a_hook_keeps_of_a_weight_stays_as_it_was(keep: Callable[..., Any], config: dict[str, Any]) -> None:
    run_ranks(out_of_a_pass, 2, keep, config)


def between_forward_and_backward() -> None:
    engine = start()
    model: Any = engine.module
    kept: list[Any] = []
    keep_in_forward(model.blocks[1].up, kept)
    want = weights(engine)[NAME]
    loss = traps.mean_square(engine(torch.ones(2, WIDTH, device=engine.device)))
    assert same(kept[0], want), "its layer was resharded long ago"
    engine.backward(loss)
    engine.step()
    assert same(kept[0], want)


def test_what_a_hook_keeps_is_right_between_forward_and_backward() -> None:
    run_ranks(between_forward_and_backward, 2)


# -------------------------------------------------------------------- and nothing is left where nobody keeps anything
STEPS_THAT_KEEP_NOTHING: tuple[traps.Step, ...] = (
    traps.plain_step,
    traps.two_backwards,
    traps.two_forwards_one_loss,
    traps.two_forwards_backwards_reversed,
    traps.retained_graph,
    traps.evaluation_between,
    traps.abandoned_forward,
    traps.gradient_penalty,
    traps.auxiliary_loss,
)


def frees_its_memory(step: traps.Step, make: Callable[[], nn.Module], zero: dict[str, Any]) -> None:
    torch.manual_seed(4)
    net = make()
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero}}
    engine = hf_zero.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config)[0]
    flats = [flat for unit in engine.units for flat in unit.flats]
    mine = [flat.storage for flat in flats]
    for number in range(STEPS):
        step(engine, torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)))
        engine.step()
    for flat, storage in zip(flats, mine, strict=True):
        assert flat.storage is storage, f"{flat.layout.name} was left to somebody"
        assert storage.nbytes() == 0 and flat.uses() == 0


@pytest.mark.parametrize("reuse", [0, 10**6], ids=["resharded", "kept"])
@pytest.mark.parametrize("step", STEPS_THAT_KEEP_NOTHING)
def test_training_leaves_no_memory_to_others(step: traps.Step, reuse: int) -> None:
    run_ranks(frees_its_memory, 2, step, traps.Net, {"stage3_max_reuse_distance": reuse})


@pytest.mark.parametrize("make", [traps.SharedAcross, traps.Repeated, traps.Nested, traps.InsideBlock])
def test_models_with_shared_and_recomputed_blocks_leave_none(make: Callable[[], nn.Module]) -> None:
    run_ranks(frees_its_memory, 2, traps.plain_step, make, {})
