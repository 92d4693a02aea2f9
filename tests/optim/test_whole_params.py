"""Optimizers that need whole matrices follow one process that has them: each parameter has one owner."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import hf_zero
from hf_zero import optim
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.optimizers.orthogonal import orthogonalized
from hf_zero.optim.registry import optimizer_of
from hf_zero.optim.updates import whole_params as whole_update
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case, _mean_loss
from tests.harness.sharded import Options, micro_step, zero_config

STEPS = 10  # of one run of every optimizer
FEW = 4  # of what it gives at other stages, on three ranks and with accumulated gradients
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def adafactor(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.05, weight_decay=0.05)


def adafactor_of_transformers(params: Iterable[Any]) -> torch.optim.Optimizer:
    return transformers.Adafactor(params, lr=0.02, relative_step=False, beta1=0.9, weight_decay=0.05)


def adafactor_with_its_own_rate(params: Iterable[Any]) -> torch.optim.Optimizer:
    return transformers.Adafactor(params)


def muon(params: Iterable[Any]) -> torch.optim.Optimizer:
    settings = {"muon_lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.05, "betas": (0.9, 0.97), "eps": 1e-6}
    return optim.Muon(params, **settings)


def muon_and_nothing_else(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02)


def build(case: Case, make: Make) -> nn.Module:
    """Build the model without the parameters whose true gradient is zero; matrices only for Muon."""
    model = case.build()
    for name, param in model.named_parameters():
        if name.endswith("attention.key.bias") or (make is muon_and_nothing_else and param.dim() != 2):
            param.requires_grad_(False)
    return model


def begin(case: Case, stage: int, make: Make, **zero: Any) -> ZeroEngine:
    config = zero_config(case, Options(stage, zero=tuple(zero.items())))
    return hf_zero.initialize(model=build(case, make), optimizer=make, config=config)[0]


def train(engine: ZeroEngine, case: Case, stage: int, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        for micro in range(case.accumulation):
            micro_step(engine, case, step, micro, Options(stage))
    return engine.full_state_dict(keep=True)


def train_stages(case: Case, stages: tuple[int, ...], make: Make) -> list[dict[str, torch.Tensor]]:
    return [
        train(begin(case, stage, make, reduce_bucket_size=331), case, stage, range(case.steps)) for stage in stages
    ]


def reference(case: Case, make: Make) -> dict[str, torch.Tensor]:
    model = build(case, make)
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    for step in range(case.steps):
        _mean_loss(model, case, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def close(make: Make, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], where: str) -> None:
    # torch's Muon computes in bf16 whatever it is given: a last bit of a gradient may become one of a bf16.
    atol = 5e-3 if make is muon_and_nothing_else else 1e-9
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=atol, msg=f"{where}, {name}")


MAKERS: list[Make] = [adafactor, adafactor_of_transformers, adafactor_with_its_own_rate, muon, muon_and_nothing_else]
MATRIX = [
    pytest.param(make, world, accumulation, stages, marks=marks)
    for make in MAKERS
    for world, accumulation, stages, marks in (
        (2, 1, (3,), [] if make in (adafactor, muon) else pytest.mark.slow),
        (2, 1, (0, 1, 2), pytest.mark.slow if make in (adafactor, muon) else pytest.mark.nightly),
        (3, 4, (1, 3), pytest.mark.slow),
    )
    if world == 2 or make in (adafactor, muon)
]


@pytest.mark.parametrize(("make", "world", "accumulation", "stages"), MATRIX)
def test_they_follow_one_process(make: Make, world: int, accumulation: int, stages: tuple[int, ...]) -> None:
    case = Case("plain", world, accumulation, steps=STEPS if stages == (3,) else FEW)
    before, want = build(case, make).state_dict(), reference(case, make)
    for stage, got in zip(stages, run_ranks(train_stages, world, case, stages, make)[0], strict=True):
        close(make, got, want, f"stage {stage}")
    trained = [name for name, param in build(case, make).named_parameters() if param.requires_grad]
    assert all(float((want[name] - before[name]).abs().max()) > 1e-3 for name in trained) and len(trained) > 10


# ---------------------------------------------------------------- checkpoints
def save_half(case: Case, stage: int, make: Make, folder: str) -> None:
    engine = begin(case, stage, make, reduce_bucket_size=331)
    train(engine, case, stage, range(3))
    engine.save_checkpoint(folder)


def resume_half(case: Case, stage: int, make: Make, folder: str) -> dict[str, torch.Tensor]:
    """The other half, at another world size: each rank sees its share of what all saw in the first."""
    engine = begin(case, stage, make)
    engine.load_checkpoint(folder)
    mine = [rank for rank in range(case.world) if rank % engine.world_size == engine.rank]
    for step in range(3, 6):
        for rank in mine:
            (engine(**case.batch(step, 0, rank))["loss"] * engine.world_size / case.world).backward()
        engine.step()
    return engine.full_state_dict(keep=True)


RESUMED = Case("plain", 4, 1, steps=6)


def for_each_maker(half: Callable[..., Any], stage: int, folder: str) -> dict[Make, Any]:
    found = {}
    for make in MAKERS:
        try:
            found[make] = half(RESUMED, stage, make, f"{folder}/{make.__name__}")
        except Exception as error:
            error.add_note(f"with {make.__name__}")
            raise
    return found


@pytest.fixture(
    scope="module",
    params=[(3, 1), *(pytest.param(one, marks=pytest.mark.nightly) for one in ((0, 2), (2, 0)))],
    ids=str,
)
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Make, Any]]:
    """Return by world size the weights of every optimizer: saved by four ranks at one stage, resumed at another."""
    stage, then = request.param
    folder = str(tmp_path_factory.mktemp("saved"))
    run_ranks(for_each_maker, RESUMED.world, save_half, stage, folder)
    return {world: run_ranks(for_each_maker, world, resume_half, then, folder)[0] for world in (1, 2, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_resume_at_another_world_size(make: Make, resumed: dict[int, dict[Make, Any]]) -> None:
    want = reference(RESUMED, make)
    for world, got in resumed.items():
        close(make, got[make], want, f"world {world}")


def load_other(case: Case, folder: str) -> None:
    begin(case, 1, adafactor_of_transformers).load_checkpoint(folder)


def test_another_class_of_the_same_name_is_said(tmp_path: Path) -> None:
    case = Case("plain", 2)
    run_ranks(save_half, 2, case, 1, adafactor, str(tmp_path))
    for failure in run_ranks(load_other, 2, case, str(tmp_path), expect_error=True):
        assert failure.kind == "CheckpointError"
        assert "torch's Adafactor, this run uses that of transformers" in failure.message


def train_in_batches(case: Case, numel: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Exchange at most `numel` elements at once, and return how many exchanges each step had, of how many elements."""
    whole_update._BATCH_NUMEL = numel
    engine = begin(case, 3, adafactor)
    engine.comm.counts.clear()
    weights = train(engine, case, 3, range(case.steps))
    count = engine.comm.counts["all_to_all"]
    return weights, [count.calls // case.steps, count.numel // case.steps]


def test_each_element_travels_three_times_in_batches() -> None:
    case = Case("plain", 2, steps=3)
    numel = sum(param.numel() for param in build(case, adafactor).parameters() if param.requires_grad)
    want = reference(case, adafactor)
    for limit, at_least, at_most in ((1 << 26, 3, 3), (200, 15, 90)):
        results = run_ranks(train_in_batches, 2, case, limit)
        assert sum(sent for _, (_, sent) in results) == 3 * numel
        for weights, (calls, _) in results:
            assert at_least <= calls <= at_most, calls
            close(adafactor, weights, want, f"batches of {limit}")


def look_into(case: Case, folder: str) -> tuple[dict[str, Any], list[str]]:
    engine = begin(case, 3, adafactor)
    train(engine, case, 3, range(1))
    engine.write_checkpoint(folder)
    assert engine.optimizer is not None
    held = [tuple(param.shape) for group in engine.optimizer.param_groups for param in group["params"]]
    report = engine.memory_report()
    names = list(engine.full_state_dict(keep=True))
    return {"held": held, "optimizer": report["optimizer"], "numel": sum(map(math.prod, held))}, names


def test_owners_share_the_work_and_state_is_not_taken_for_weights(tmp_path: Path) -> None:
    case = Case("plain", 2)
    results = run_ranks(look_into, 2, case, str(tmp_path))
    shapes = [tuple(param.shape) for param in build(case, adafactor).parameters() if param.requires_grad]
    held = [one["held"] for one, _ in results]
    assert sorted(held[0] + held[1]) == sorted(shapes), "each parameter has one owner"
    numels = [one["numel"] for one, _ in results]
    assert abs(numels[0] - numels[1]) < max(math.prod(shape) for shape in shapes)
    for one, _ in results:
        assert 0 < one["optimizer"] < 4 * one["numel"], "row and column means only"
    output = tmp_path / "weights.safetensors"
    script = [sys.executable, str(tmp_path / "consolidate.py"), str(tmp_path), str(output)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names = set(safetensors.torch.load_file(output)) if output.is_file() else set()
    assert names == set(results[0][1])


# ---------------------------------------------------------------- reading state
def read_state(case: Case) -> tuple[dict[str, torch.Tensor], list[str]]:
    engine = begin(case, 3, adafactor)
    weight = engine.module.get_parameter("head.weight")
    assert hf_zero.full_optimizer_state(weight, "row_var") is None
    train(engine, case, 3, range(3))
    found = {kind: hf_zero.full_optimizer_state(weight, kind) for kind in ("row_var", "col_var", "step", "master")}
    said = []
    for call in (
        lambda: hf_zero.full_optimizer_state(weight, "exp_avg"),
        lambda: hf_zero.local_optimizer_state(weight, "row_var"),
        lambda: hf_zero.set_full_optimizer_state(weight, "row_var", found["master"]),
    ):
        with pytest.raises(StateError) as raised:
            call()
        said.append(str(raised.value))
    return {kind: value for kind, value in found.items() if value is not None}, said


def test_state_of_an_owner_is_read_on_every_rank() -> None:
    case = Case("plain", 2, steps=3)
    model = build(case, adafactor)
    optimizer = adafactor([param for param in model.parameters() if param.requires_grad])
    for step in range(3):
        _mean_loss(model, case, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    want = optimizer.state[model.get_parameter("head.weight")]
    for found, said in run_ranks(read_state, 2, case):
        for kind in ("row_var", "col_var", "step"):
            torch.testing.assert_close(found[kind], want[kind], rtol=1e-9, atol=0)
        torch.testing.assert_close(found["master"], model.get_parameter("head.weight").detach(), rtol=0, atol=1e-9)
        assert "only col_var, master, row_var, step" in said[0]
        assert all("is on one rank" in text for text in said[1:])


# ---------------------------------------------------------------- Muon itself, and its block
# DeepSpeed 0.19.8's Newton-Schulz functions on the CPU, of sin(0.7 i^2): the first two elements and the norm.
DEEPSPEED = [
    ((7, 11), "gram", (-0.1869, 0.25011, 2.64198)),
    ((7, 11), "standard", (-0.19922, 0.25586, 2.62869)),
    ((11, 7), "gram", (0.07574, 0.34091, 2.48231)),
    ((11, 7), "standard", (0.07812, 0.34766, 2.50782)),
    ((5, 5), "gram", (0.02347, 0.77029, 2.26881)),
    ((5, 5), "standard", (0.02734, 0.72656, 2.26011)),
]


@pytest.mark.parametrize(("shape", "method", "want"), DEEPSPEED)
def test_orthogonalization_is_deepspeeds(shape: tuple[int, int], method: str, want: tuple[float, ...]) -> None:
    matrix = torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) ** 2 * 0.7).view(shape)
    got = orthogonalized(matrix, method).float()
    values = [*got.flatten()[:2].tolist(), got.norm().item()]
    assert values == pytest.approx(want, abs=2e-5 if method == "gram" else 0.01)
    sizes = torch.linalg.svdvals(orthogonalized(matrix.double(), method))
    assert float(sizes.min()) > 0.6 and float(sizes.max()) < 1.2


def test_muon_follows_torch_where_both_compute_the_same() -> None:
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(12, 5)), nn.Parameter(torch.randn(4, 9)), nn.Parameter(torch.randn(6))]
    second = [nn.Parameter(param.detach().clone()) for param in first]
    mine = optim.Muon(first, lr=0.02, weight_decay=0.1, ns_method="standard", eps=1e-8)
    theirs = torch.optim.Muon(second[:2], lr=0.02, weight_decay=0.1)
    adam = torch.optim.AdamW(second[2:], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))
    before = [param.detach().clone() for param in first]
    for _ in range(5):
        for one, other in zip(first, second, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        for optimizer in (mine, theirs, adam):
            optimizer.step()
    for one, other, old, atol in zip(first, second, before, (6e-3, 6e-3, 1e-6), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
        assert float((one - old).abs().max()) > 0.02


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.body, self.lm_head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_block_leaves_embeddings_and_the_head_to_adam(grouped: bool) -> None:
    model = Named()
    block = {"type": "muon", "params": {"lr": 1e-2, "adam_lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}}
    resolved = hf_zero.ZeroConfig.load({"optimizer": block}).resolve(model=model)
    assert resolved.optimizer is not None
    kind, arguments = optimizer_of(resolved.optimizer, model)
    params = list(model.parameters())
    made = kind([{"params": params, "weight_decay": 0.0}] if grouped else params, **arguments)
    for group in made.param_groups:
        assert group["weight_decay"] == (0.0 if grouped else 0.1)
    muons, adams = made.param_groups
    assert [id(param) for param in muons["params"]] == [id(model.body.weight)]
    assert muons["lr"] == 1e-2 and adams["lr"] == 1e-3 and muons["momentum"] == 0.9 and len(adams["params"]) == 3


def test_what_muon_cannot_take_is_named() -> None:
    with pytest.raises(ConfigError, match="ns_method"):
        optim.Muon([nn.Parameter(torch.ones(2, 2))], ns_method="newton")
    with pytest.raises(ConfigError, match="for matrices"):
        optim.Muon([{"params": [nn.Parameter(torch.ones(2))], "use_muon": True}])
    with pytest.raises(ConfigError, match="per_head_muon"):
        block = {"type": "Muon", "params": {"per_head_muon": True}}
        hf_zero.ZeroConfig.load({"optimizer": block}).resolve()


# ---------------------------------------------------------------- parameters that join later, and 16 bits
def thaw_at(model: nn.Module, step: int) -> None:
    if step == 2:
        model.get_parameter("layers.1.up.weight").requires_grad_(True)
        model.get_parameter("layers.1.up.bias").requires_grad_(True)


def hold_back(model: nn.Module) -> None:
    for name in ("layers.1.up.weight", "layers.1.up.bias"):
        model.get_parameter(name).requires_grad_(False)


def train_thawing(case: Case, stage: int, make: Make) -> dict[str, torch.Tensor]:
    model = build(case, make)
    hold_back(model)
    options = Options(stage)
    optimizer = make(list(model.parameters()))
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=zero_config(case, options))[0]
    for step in range(case.steps):
        thaw_at(model, step)
        micro_step(engine, case, step, 0, options)
    return engine.full_state_dict(keep=True)


@pytest.mark.slow
@pytest.mark.parametrize("make", [adafactor, muon])
def test_parameters_that_join_later_get_owners(make: Make) -> None:
    case = Case("plain", 2, steps=5, clip=1e9)
    model = build(case, make)
    hold_back(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make(list(model.parameters()))
    for step in range(case.steps):
        thaw_at(model, step)
        _mean_loss(model, case, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float((model.state_dict()["layers.1.up.weight"] - before["layers.1.up.weight"]).abs().max()) > 0.01
    for stage in (1, 3):
        close(make, run_ranks(train_thawing, 2, case, stage, make)[0], model.state_dict(), f"stage {stage}")


def join_as_matrix() -> str:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].requires_grad_(False)
    matrices = [{"params": [model[0].weight], "use_muon": True}, {"params": [model[0].bias], "use_muon": False}]
    config = {"zero_optimization": {"stage": 2}}
    _, optimizer, *_ = hf_zero.initialize(model=model, optimizer=optim.Muon(matrices), config=config)
    assert optimizer is not None
    model[1].requires_grad_(True)
    with pytest.raises(ConfigError) as refused:
        optimizer.add_param_group({"params": [model[1].bias], "use_muon": True})
    assert len(optimizer.param_groups) == 2
    optimizer.add_param_group({"params": [model[1].weight], "use_muon": True})
    return str(refused.value)


def test_what_joins_is_checked_by_its_shape() -> None:
    for text in run_ranks(join_as_matrix, 2):
        assert "use_muon is for matrices, not for parameters of shapes [(2,)]" in text


def train_in_bf16(case: Case, make: Make) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in (0, 3):
        config = {**zero_config(case, Options(stage)), "bf16": {"enabled": True}}
        engine = hf_zero.initialize(model=build(case, make), optimizer=make, config=config)[0]
        train(engine, case, stage, range(case.steps))
        weight = engine.module.get_parameter("layers.0.up.weight")
        master = hf_zero.full_optimizer_state(weight, "master")
        assert master is not None and master.dtype == torch.float32 and weight.dtype == torch.bfloat16
        found.append(master)
    return found


def lamb(params: Iterable[Any]) -> torch.optim.Optimizer:
    return optim.Lamb(params, lr=0.02, eps=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("make", [adafactor, muon, lamb])
def test_masters_of_a_bf16_model_are_updated(make: Make) -> None:
    case = Case("plain", 2, steps=5, single=True)
    before = build(case, make).get_parameter("layers.0.up.weight")
    for whole, sharded in run_ranks(train_in_bf16, 2, case, make):
        torch.testing.assert_close(sharded, whole, rtol=0, atol=1e-3)
        assert 0.01 < float((whole - before).abs().max()) < 1


# ---------------------------------------------------------------- several types in one group
class TwoTypes(nn.Module):
    """The gradient of `low` is so small that the eps of its type counts."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.low = nn.Linear(12, 12).double(), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1e-3 * self.low(torch.tanh(self.first(x)).float()).double().square().mean()


def two_types(make: Callable[[nn.Module], torch.optim.Optimizer], stage: int) -> dict[str, torch.Tensor]:
    model = TwoTypes()
    optimizer = make(model)
    batch = torch.linspace(-1, 1, 60, dtype=torch.float64).view(5, 12)
    if stage < 0:  # one process
        for _ in range(3):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    for _ in range(3):
        engine.backward(engine(batch))
        engine.step()
    return engine.full_state_dict(keep=True)


def one_group(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.02)


def one_group_with_eps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.02, eps=(1e-9, 1e-3))


def group_for_each_type(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model.get_submodule(name).parameters())} for name in ("first", "low")]
    return torch.optim.Adafactor(groups, lr=0.02)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("make", [one_group_with_eps, group_for_each_type])
def test_parameters_of_several_types(make: Callable[[nn.Module], torch.optim.Optimizer], stage: int) -> None:
    before, want = TwoTypes().state_dict(), two_types(make, -1)
    assert all(float((want[name] - before[name]).abs().max()) > 1e-3 for name in want)
    for got in run_ranks(two_types, 2, make, stage):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6, msg=name)


def test_several_types_in_one_group_need_an_eps() -> None:
    """torch takes the eps of the first one's type for all: one process itself gives something else."""
    one, other = two_types(one_group, -1), two_types(group_for_each_type, -1)
    assert float((one["low.weight"] - other["low.weight"]).abs().max()) > 1e-4
    for stage in (1, 2, 3):
        for failure in run_ranks(two_types, 2, one_group, stage, expect_error=True):
            assert failure.kind == "ConfigError"
            assert "several types (torch.float32, torch.float64)" in failure.message
    assert run_ranks(two_types, 2, one_group, 0)[0]["low.weight"].equal(one["low.weight"])
