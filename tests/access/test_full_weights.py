"""Whole weights out of a sharded model and back: full_state_dict, load_full_state_dict, gathered_params, teardown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.errors import CheckpointError
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case
from tests.harness.sharded import Options, micro_step, start, zero_config

STAGES = (0, 1, 2, 3)
BF16 = (("bf16", {"enabled": True}),)


def read_all(stage: int) -> dict[str, Any]:
    case = Case("tied+frozen", 2)
    plain = case.build().state_dict()
    engine = start(case, Options(stage))
    whole = engine.full_state_dict(keep=True)
    mine = engine.full_state_dict(keep=engine.rank == 1)
    trainable = engine.full_state_dict(keep=True, trainable_only=True)
    wanted = {name for name, param in engine.module.named_parameters(remove_duplicate=False) if param.requires_grad}
    return {
        "names in order": list(whole) == list(plain),
        "values": all(torch.equal(whole[name], value) for name, value in plain.items()),
        "tied": whole["head.weight"] is whole["embed.weight"],
        "keep": (mine.keys() == plain.keys()) if engine.rank == 1 else mine == {},
        "trainable_only": trainable.keys() == wanted,
        "own memory": all(value.untyped_storage().nbytes() == value.nbytes for value in whole.values()),
        "full_param": torch.equal(hf_zero.full_param(engine.module, "head.weight"), plain["embed.weight"]),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_full_state_dict(stage: int) -> None:
    for seen in run_ranks(read_all, 2, stage):
        assert all(seen.values()), seen


def replace_all(stage: int, config: tuple[tuple[str, Any], ...], how: str) -> dict[str, Any]:
    """Training goes on from the weights that are loaded or written, masters included."""
    case = Case("plain", 2, 1, "sgd", single=True, clip=1e9)
    other = case.build().state_dict()
    other = {name: value * 1.5 + 0.001 for name, value in other.items()}
    engine = start(case, Options(stage, config=config))
    micro_step(engine, case, 0, 0, Options(stage))
    if how == "load":
        engine.load_full_state_dict(other)
    elif how == "load_state_dict":
        with hf_zero.gathered_params(engine.module, write_rank=0):
            engine.module.load_state_dict(other)
    else:
        with hf_zero.gathered_params(engine.module, write_rank=1), torch.no_grad():
            for name, param in engine.module.named_parameters():
                param.copy_(other[name] if engine.rank == 1 else param)
        engine.module.scale.copy_(other["scale"])
    loaded = engine.full_state_dict(keep=True)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0  # an update that moves nothing writes the masters into the parameters
    micro_step(engine, case, 1, 0, Options(stage))
    after = engine.full_state_dict(keep=True)
    same = {name: torch.equal(loaded[name], value.to(loaded[name].dtype)) for name, value in other.items()}
    kept = {name: torch.equal(loaded[name], after[name]) for name in after}
    return {"loaded": all(same.values()), "masters": all(kept.values())}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["load", "load_state_dict", "write"])
@pytest.mark.parametrize("config", [(), BF16], ids=["fp32", "bf16"])
def test_new_weights_are_trained_on(how: str, config: tuple[tuple[str, Any], ...]) -> None:
    for stage in STAGES:
        for seen in run_ranks(replace_all, 2, stage, config, how):
            assert all(seen.values()), (stage, seen)


def load_wrong() -> list[str]:
    engine = start(Case("plain", 2), Options(3))
    state = engine.full_state_dict(keep=True)
    texts = []
    renamed = {("nobody" if name == "head.weight" else name): value for name, value in state.items()}
    reshaped = {name: value[:-1] if name == "head.weight" else value for name, value in state.items()}
    for wrong in (renamed, reshaped):
        try:
            engine.load_full_state_dict(wrong)
        except CheckpointError as error:
            texts.append(str(error))
    assert all(torch.equal(value, state[name]) for name, value in engine.full_state_dict(keep=True).items())
    engine.load_full_state_dict({"norm.bias": torch.ones(11)}, strict=False)
    assert engine.full_state_dict(keep=True)["norm.bias"].tolist() == [1.0] * 11
    return texts


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    for texts in run_ranks(load_wrong, 2):
        assert "head.weight" in texts[0] and "nobody" in texts[0]
        assert "head.weight" in texts[1] and "(16, 11)" in texts[1] and "(17, 11)" in texts[1]


def tear_down(stage: int) -> dict[str, Any]:
    case = Case("tied", 2)
    options = Options(stage)
    engine = start(case, options)
    micro_step(engine, case, 0, 0, options)
    want = engine.full_state_dict(keep=True)
    model = engine.module
    engine.teardown()
    again = start_again(model, case, options)
    return {
        "values": all(torch.equal(want[name], value) for name, value in again["state"].items()),
        "tied": again["tied"],
        "trains": again["loss"] > 0,
    }


def start_again(model: torch.nn.Module, case: Case, options: Options) -> dict[str, Any]:

    state = {name: value.clone() for name, value in model.state_dict().items()}
    config = zero_config(case, options)
    engine = hf_zero.initialize(model=model, optimizer=case.make_optimizer(model), config=config)[0]
    tied = model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    return {"state": state, "tied": tied, "loss": micro_step(engine, case, 1, 0, options)}


@pytest.mark.parametrize("stage", STAGES)
def test_teardown_gives_a_plain_model_that_can_start_again(stage: int) -> None:
    for seen in run_ranks(tear_down, 2, stage):
        assert all(seen.values()), seen


def integers_and_back(stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what full_state_dict gives of parameters that are no floats, before and after others were loaded."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model.order = torch.nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    before = engine.full_state_dict(keep=True)
    engine.load_full_state_dict({**before, "order": torch.tensor([1, 2, 0])})
    return before, engine.full_state_dict(keep=True)


@pytest.mark.parametrize("stage", (1, 3))
def test_integer_parameters_are_weights_too(stage: int) -> None:
    for before, after in run_ranks(integers_and_back, 2, stage):
        assert before.keys() == after.keys() == {"order", "0.weight", "0.bias"}
        assert before["order"].tolist() == [2, 0, 1] and after["order"].tolist() == [1, 2, 0]
