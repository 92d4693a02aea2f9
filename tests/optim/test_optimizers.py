"""Every optimizer of an `optimizer` block follows one process that computes its formula on whole parameters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero import optim
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError
from hf_zero.optim.optimizer_types import OPTIMIZERS
from tests.harness.at_night import all_at_night
from tests.harness.optimizer_formulas import FORMULAS, State
from tests.harness.ranks import RankFailure, run_ranks
from tests.harness.reference import Case, _mean_loss
from tests.harness.sharded import Options, micro_step, zero_config

STEPS = 10  # of one run of every optimizer
FEW = 4  # of what it gives at other stages and with accumulated gradients
LAMB = {"lr": 0.02, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.1}
BLOCKS: dict[str, dict[str, Any]] = {
    "Lion": {"type": "Lion", "params": {"lr": 0.01, "betas": [0.9, 0.97], "weight_decay": 0.1}},
    "Lamb": {"type": "Lamb", "params": LAMB},
    "Lamb, other settings": {
        "type": "lamb",
        "params": {**LAMB, "bias_correction": False, "eps_inside_sqrt": True, "max_coeff": 2.0, "min_coeff": 0.5},
    },
    "Adam, bias_correction false": {
        "type": "Adam",
        "params": {"lr": 0.003, "betas": [0.9, 0.97], "eps": 1e-6, "weight_decay": 0.1, "bias_correction": False},
    },
    "Adam, L2, bias_correction false": {
        "type": "Adam",
        "params": {"lr": 0.003, "betas": [0.9, 0.97], "eps": 1e-6, "weight_decay": 0.1, "adam_w_mode": False}
        | {"bias_correction": False},
    },
}
slow = pytest.mark.slow


def build(case: Case) -> torch.nn.Module:
    """The case's model, without the parameters whose true gradient is zero: its sign is that of a rounding error."""
    model = case.build()
    for name, param in model.named_parameters():
        if name.endswith("attention.key.bias"):
            param.requires_grad_(False)
    return model


def begin(case: Case, stage: int, block: dict[str, Any], **zero: Any) -> ZeroEngine:
    config = zero_config(case, Options(stage, zero=tuple(zero.items())))
    return hf_zero.initialize(model=build(case), config={**config, "optimizer": block})[0]


def train(engine: ZeroEngine, case: Case, stage: int, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        for micro in range(case.accumulation):
            micro_step(engine, case, step, micro, Options(stage))
    return engine.full_state_dict(keep=True)


def train_block(case: Case, stages: tuple[int, ...], block: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    # Buckets that cut parameters into several pieces: convnet's largest has 27,248 elements, Toy's 187.
    size = 7649 if case.model == "convnet" else 331
    return [
        train(begin(case, stage, block, reduce_bucket_size=size), case, stage, range(case.steps)) for stage in stages
    ]


def reference(case: Case, block: dict[str, Any]) -> tuple[dict[str, torch.Tensor], State]:
    """(parameters after the last step, state) of the formula in this process."""
    model = build(case)
    names = {param: name for name, param in model.named_parameters()}
    params = {name: param.data for param, name in names.items()}
    state: State = {}
    options = {"betas": (0.9, 0.999), "weight_decay": 0.0, **block["params"]}
    for step in range(case.steps):
        _mean_loss(model, case, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        grads = {name: param.grad for param, name in names.items() if param.grad is not None}
        FORMULAS[block["type"].capitalize()](params, grads, state, step, **options)
        model.zero_grad()
    return model.state_dict(), state


def follows(case: Case, stages: tuple[int, ...], block: dict[str, Any]) -> State:
    before = case.build().state_dict()
    want, state = reference(case, block)
    for stage, got in zip(stages, run_ranks(train_block, case.world, case, stages, block)[0], strict=True):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-9, msg=f"stage {stage}, {name}")
    moved = [name for name in state if float((want[name] - before[name]).abs().max()) > case.steps * 5e-4]
    assert len(moved) == len(state) > 10, "every parameter moved"
    return state


MATRIX = [
    pytest.param(name, accumulation, stages, marks=marks, id=f"{name}-{accumulation}-{stages}")
    for name in BLOCKS
    for accumulation, stages, marks in (
        (1, (3,), slow if "," in name else []),
        (1, (0, 1, 2), pytest.mark.nightly),
        (3, (0, 1, 2, 3), pytest.mark.nightly if "," in name else slow),
    )
]


@pytest.mark.parametrize(("name", "accumulation", "stages"), MATRIX)
def test_blocks_follow_their_formula(name: str, accumulation: int, stages: tuple[int, ...]) -> None:
    case = Case("plain", 2, accumulation, steps=STEPS if stages == (3,) else FEW)
    state = follows(case, stages, BLOCKS[name])
    if name.startswith("Lamb"):
        ratios = {ratio for own in state.values() for ratio in own["ratios"]}
        assert len(ratios) > 100 and all(abs(ratio - 1) > 1e-6 for ratio in ratios)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BLOCKS if name.startswith("Adam")])
def test_adam_without_bias_correction_is_native_under_offload(name: str) -> None:
    case = Case("plain", 2, 2, steps=STEPS)
    want = reference(case, BLOCKS[name])[0]
    for got in run_ranks(train_offloaded, 2, case, BLOCKS[name]):
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-9, msg=key)


def train_offloaded(case: Case, block: dict[str, Any], *, native: bool = True) -> dict[str, torch.Tensor]:
    options = Options(2, zero=(("offload_optimizer", {"device": "cpu"}),))
    engine = hf_zero.initialize(model=build(case), config={**zero_config(case, options), "optimizer": block})[0]
    assert engine.optimizer is not None
    assert {run.native for run in engine.optimizer.owned} == {native}
    return train(engine, case, 2, range(case.steps))


# By torch on the host where a block names them, as DeepSpeed does.
HOSTED: dict[str, dict[str, Any]] = {
    "Lion": BLOCKS["Lion"],
    "SGD": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 0.05, "eps": 1e-6}},
    "Adafactor": {"type": "Adafactor", "params": {"lr": 0.02}},
    "Muon": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.01, "eps": 1e-6}},
}


def train_both(case: Case, block: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return train(begin(case, 2, block), case, 2, range(case.steps)), train_offloaded(case, block, native=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTED)
def test_others_are_offloaded_by_torch(name: str) -> None:
    case = Case("plain", 2, 1, steps=5)
    for want, got in run_ranks(train_both, 2, case, HOSTED[name]):
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-9, msg=key)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    resolved = hf_zero.ZeroConfig.load({"optimizer": HOSTED[name], "zero_optimization": zero}).resolve()
    assert f"optimizer.type = {name} has no native update" in "".join(resolved.notices)


def offload_instance(native: bool) -> None:
    model = build(Case())
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": native}
    hf_zero.initialize(model=model, optimizer=optim.Lion(model.parameters()), config=config)


def test_an_instance_is_refused_under_offload_as_deepspeed_does() -> None:
    for failure in run_ranks(offload_instance, 2, True, expect_error=True):
        assert failure.kind == "ConfigError" and "Lion cannot update offloaded states" in failure.message
        assert "zero_force_ds_cpu_optimizer" in failure.message
    run_ranks(offload_instance, 2, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    all_at_night(
        itertools.product(("unused_somewhere", "frozen", "tied", "convnet"), ("Lion", "Lamb")),
        (("unused_somewhere", "Lamb"), ("frozen", "Lion"), ("tied", "Lamb"), ("convnet", "Lion"), ("convnet", "Lamb")),
    ),
)
def test_other_models_and_worlds(model: str, name: str) -> None:
    case = Case(model, 3, 1, steps=3)
    want = reference(case, BLOCKS[name])[0]
    for got in run_ranks(train_block, 3, case, (1, 3), BLOCKS[name])[0]:
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-9, msg=key)


# ---------------------------------------------------------------- torch's, by name
BY_NAME: dict[str, dict[str, Any]] = {
    "Adam": {"adam_w_mode": False, "weight_decay": 0.1, "eps": 1e-6},
    "AdamW": {"weight_decay": 0.1, "eps": 1e-6},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.01},
    "Adadelta": {"lr": 1.0, "rho": 0.8},
    "Adafactor": {"beta2_decay": -0.7, "weight_decay": 0.1},
    "Adamax": {"eps": 1e-6},
    "ASGD": {"lr": 0.1, "t0": 2.0},
    "NAdam": {"eps": 1e-6, "momentum_decay": 0.01},
    "RAdam": {"lr": 0.1, "eps": 1e-6},
    "RMSprop": {"eps": 1e-6, "momentum": 0.5, "centered": True},
    "Rprop": {"etas": [0.6, 1.1]},
}


def train_by_name(case: Case, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, params in BY_NAME.items():
        block = {"type": name, "params": {"lr": 0.02, **params}}
        found[name] = train(begin(case, stage, block), case, stage, range(case.steps))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "accumulation"),
    [(3, 1), *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((0, 1), (1, 3), (2, 3)))],
)
def test_classes_of_torch_by_name(stage: int, accumulation: int) -> None:
    in_torch = [path for path, one in OPTIMIZERS.items() if path.startswith("torch.optim.") and one.params]
    assert set(BY_NAME) == {path.rpartition(".")[2] for path in in_torch}
    case = Case("plain", 2, accumulation, steps=STEPS if stage == 3 else FEW)
    got = run_ranks(train_by_name, 2, case, stage, timeout=200)[0]
    for name, params in BY_NAME.items():
        given = {"lr": 0.02, **{key: value for key, value in params.items() if key != "adam_w_mode"}}
        model = build(case)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        optimizer = getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], **given)
        for step in range(case.steps):
            _mean_loss(model, case, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(got[name][key], value, rtol=0, atol=1e-8, msg=f"{name}, {key}")
        assert float((model.state_dict()["head.weight"] - before["head.weight"]).abs().max()) > 1e-3, name


# ---------------------------------------------------------------- checkpoints
def save_half(case: Case, stage: int, block: dict[str, Any], folder: str) -> None:
    engine = begin(case, stage, block)
    train(engine, case, stage, range(3))
    engine.save_checkpoint(folder)


def resume_half(case: Case, stage: int, block: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    """The other half, at another world size; the batches are those of the first one."""
    engine = begin(case, stage, block)
    engine.load_checkpoint(folder)
    if dist.get_world_size() == case.world:
        return train(engine, case, stage, range(3, 6))
    for step in range(3, 6):
        for rank in range(case.world):  # one rank sees what all had
            (engine(**case.batch(step, 0, rank))["loss"] / case.world).backward()
        engine.step()
    return engine.full_state_dict(keep=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Lion", "Lamb"])
@pytest.mark.parametrize(("stage", "then"), all_at_night([(1, 3), (3, 1), (3, 0)], [(3, 1)]))
def test_resume_at_another_world_size(tmp_path: Path, name: str, stage: int, then: int) -> None:
    case = Case("plain", 2, 1, steps=6)
    run_ranks(save_half, 2, case, stage, BLOCKS[name], str(tmp_path))
    want = reference(case, BLOCKS[name])[0]
    for world in (1, 2):
        got = run_ranks(resume_half, world, case, then, BLOCKS[name], str(tmp_path))[0]
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-9, msg=f"{key} at {world}")


# ---------------------------------------------------------------- what travels
def count_norms(case: Case) -> tuple[int, int, list[float]]:
    engine = begin(case, 3, BLOCKS["Lamb"])
    engine.comm.counts.clear()
    train(engine, case, 3, range(1))
    count = engine.comm.counts["all_reduce"]
    assert engine.optimizer is not None and isinstance(engine.optimizer.optimizer, optim.Lamb)
    return count.calls, count.numel, engine.optimizer.optimizer.get_lamb_coeffs()


def test_lamb_sends_one_message_per_step() -> None:
    case = Case("plain", 2)
    num_params = sum(param.requires_grad for param in build(case).parameters())
    for calls, numel, ratios in run_ranks(count_norms, 2, case):
        assert (calls, numel) == (1, 2 * num_params)
        assert len(ratios) > 5 and all(0.01 <= ratio <= 10 for ratio in ratios) and len(set(ratios)) > 5


# ---------------------------------------------------------------- as ordinary torch optimizers, and their errors
@pytest.mark.parametrize("kind", [optim.Lamb, optim.Lion])
def test_values_out_of_range_are_named(kind: Any) -> None:
    with pytest.raises(ConfigError, match="lr=-1"):
        kind([torch.nn.Parameter(torch.ones(3))], lr=-1.0)
    with pytest.raises(ConfigError, match="betas"):
        kind([torch.nn.Parameter(torch.ones(3))], betas=(0.9, 1.0))


def test_lion_leaves_elements_without_gradient_alone() -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    optimizer = optim.Lion([param], lr=0.5)
    param.grad = torch.tensor([0.0, 4.0, -4.0], dtype=torch.bfloat16)
    optimizer.step()
    assert param.tolist() == [1.0, 1.5, 3.5] and optimizer.state[param]["exp_avg"].dtype == torch.float32


class FusedLamb(torch.optim.SGD):
    """Stands for a Lamb from elsewhere: it would take the norm of what it holds."""


def attach_foreign_lamb() -> None:
    model = Case().build()
    config = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    hf_zero.initialize(model=model, optimizer=FusedLamb(model.parameters(), lr=0.1), config=config)


def test_a_lamb_from_elsewhere_is_refused() -> None:
    for failure in run_ranks(attach_foreign_lamb, 2, expect_error=True):
        assert isinstance(failure, RankFailure) and failure.kind == "ConfigError"
        assert "FusedLamb" in failure.message and "hf_zero.optim.Lamb" in failure.message


@pytest.mark.parametrize(
    ("block", "zero", "wrong"),
    [
        ({"type": "Lamb"}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "Lamb does not go with"),
        (
            {"type": "Lion"},
            {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
            "updated by native code",
        ),
        (
            {"type": "Lion"},
            {"stage": 2, "offload_optimizer": {"device": "cpu", "delayed_update": True}},
            'optimizer.type = "Lion" leaves the update to torch',
        ),
        ({"type": "Lamb", "params": {"amsgrad": True}}, {}, "Lamb does not have it"),
        ({"type": "Lamb", "params": {"max_grad_norm": 1.0}}, {}, "gradient_clipping"),
        ({"type": "Lion", "params": {"eps": 1e-8}}, {}, "unknown key"),
        ({"type": "Lion", "params": {"betas": [0.9]}}, {}, "a list of 2 numbers"),
        ({"type": "AdamW", "params": {"bias_correction": False, "amsgrad": True}}, {}, "does not go with bias"),
        ({"type": "OneBitAdam", "params": {"freeze_step": 0}}, {}, "of at least 1"),
        ({"type": "OneBitAdam", "params": {"eps_inside_sqrt": True}}, {}, "adds eps to the square root"),
        ({"type": "Adafactor", "params": {"eps": 1e-8}}, {}, "a list of 2 numbers"),
        ({"type": "Muon", "params": {"ns_method": "svd"}}, {}, '"gram" or "standard"'),
        ({"type": "ZeroOneAdam", "params": {"anything": 1}}, {}, "not supported yet"),
    ],
)
def test_blocks_are_checked(block: dict[str, Any], zero: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as raised:
        hf_zero.ZeroConfig.load({"optimizer": block, "zero_optimization": zero}).resolve()
    assert "1 problem" in str(raised.value)
