"""Parameters frozen and unfrozen during a run train as in one process, at every stage and medium; late ones too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.checkpoint.folders import chosen, read_manifest
from hf_zero.errors import StateError, ZeroError
from tests.harness.ranks import RankFailure, run_ranks
from tests.runtime.test_second_model import Net

STEPS = 8
RATE = 1e-2


def build() -> Net:
    torch.manual_seed(5)
    return Net().double()


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def set_frozen(model: nn.Module, step: int) -> None:
    """Freeze half of a layer, then all of another, then some again."""
    flags = {
        0: {"layers.0": False, "layers.1.bias": False, "head": False},
        2: {"layers.1.bias": True},
        3: {"layers.0.weight": True, "layers.2": False},
        4: {"layers.0.bias": True},
        5: {"layers.2": True, "head": True, "layers.1.weight": False},
        6: {"layers.1.weight": True},
    }
    for prefix, wanted in flags.get(step, {}).items():
        for name, param in model.named_parameters():
            if name.startswith(prefix):
                param.requires_grad_(wanted)


def run(model: nn.Module, optimizer: Any, step: Any, share: slice, late: bool) -> None:
    """`late`: the optimizer gets what is unfrozen when it is, as groups of its own."""
    known = {id(p) for p in model.parameters() if p.requires_grad}
    for number in range(STEPS):
        set_frozen(model, number)
        new = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
        known |= {id(p) for p in new}
        if late and number and new:
            optimizer.add_param_group({"params": new, "lr": RATE / 2})
        model(rows(number)[share]).square().mean().backward()
        step()


def make(model: nn.Module, late: bool) -> torch.optim.Optimizer:
    set_frozen(model, 0)
    params = [p for p in model.parameters() if p.requires_grad or not late]
    return torch.optim.AdamW(params, lr=RATE, eps=1e-3)


def in_one_process(late: bool) -> dict[str, torch.Tensor]:
    model = build()
    optimizer = make(model, late)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    run(model, optimizer, step, slice(None), late)
    return dict(model.state_dict())


def sharded(stage: int, more: dict[str, Any], late: bool, folder: str) -> dict[str, torch.Tensor]:
    model = build()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more}
    engine, optimizer, *_ = hf_zero.initialize(
        model=model, optimizer=make(model, late), config={"zero_optimization": zero, "gradient_clipping": 0.0}
    )
    assert optimizer is not None
    run(model, optimizer, engine.step, slice(engine.rank, None, engine.world_size), late)
    weights = engine.full_state_dict(keep=True)
    assert engine.params.live.numel == engine.params.live.nbytes == 0, "units that were cut anew are counted out as in"
    states = [hf_zero.full_optimizer_state(model, "exp_avg", name) for name, _ in model.named_parameters()]
    engine.save_checkpoint(folder)
    # A new run, with all of them trainable from the start, goes on where this one ended.
    again = build()
    group_of = read_manifest(chosen(folder)).param_group_of
    assert len(set(group_of.values())) == (len(optimizer.param_groups) if late else 0)
    groups: list[dict[str, Any]] = [{"params": []} for _ in optimizer.param_groups]
    for name, param in again.named_parameters():
        groups[group_of.get(name, 0)]["params"].append(param)
    other, *_ = hf_zero.initialize(
        model=again, optimizer=torch.optim.AdamW(groups, lr=RATE), config={"zero_optimization": zero}
    )
    other.load_checkpoint(folder)
    assert [group["lr"] for group in other.optimizer.param_groups] == [RATE] + [RATE / 2] * (len(groups) - 1)
    for (name, _), state in zip(again.named_parameters(), states, strict=True):
        mine = hf_zero.full_optimizer_state(again, "exp_avg", name)
        assert state is not None and mine is not None and torch.equal(mine, state), name
    assert all(torch.equal(value, weights[name]) for name, value in other.full_state_dict(keep=True).items())
    return weights


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "parameters on the host": (3, {"offload_param": {"device": "cpu"}}),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_unfreezing_equals_one_process(case: str, late: bool, tmp_path: Any) -> None:
    want = in_one_process(late)
    assert not torch.equal(want["layers.0.weight"], build().state_dict()["layers.0.weight"])
    for got in run_ranks(sharded, 2, *CASES[case], late, str(tmp_path)):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)


def in_fp32(stage: int, more: dict[str, Any], late: bool) -> float:
    model = build().float()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more}
    engine, optimizer, *_ = hf_zero.initialize(
        model=model, optimizer=make(model, late), config={"zero_optimization": zero}
    )

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.float())

    named = Rounded()
    named.named_parameters = model.named_parameters  # type: ignore[method-assign]
    run(named, optimizer, engine.step, slice(engine.rank, None, engine.world_size), late)
    want = in_one_process(late)
    got = engine.full_state_dict(keep=True)
    return max((got[name].double() - value).abs().max().item() for name, value in want.items())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_unfreezing_with_states_on_the_host(stage: int, late: bool) -> None:
    assert max(run_ranks(in_fp32, 2, stage, {"offload_optimizer": {"device": "cpu"}}, late)) < 3e-5


def unfreeze_wrongly(folder: str, between: bool) -> None:
    model = build().float()
    block = {} if between else {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **block}
    engine, *_ = hf_zero.initialize(model=model, optimizer=make(model, False), config={"zero_optimization": zero})
    loss = model(rows(0).float()).mean()
    model.requires_grad_(True)
    if not between:
        loss.backward()
        engine.step()
    model(rows(0).float())


@pytest.mark.parametrize("between", [False, True])
def test_where_unfreezing_is_refused(between: bool, tmp_path: Any) -> None:
    for failure in run_ranks(unfreeze_wrongly, 2, str(tmp_path), between, expect_error=True):
        assert failure.kind == "StateError" and "require gradients" in failure.message


# ---------------------------------------------------------------- parameters that come later
class Adapted(nn.Module):
    """A layer with a factor beside it, which was not there when the engine was made."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.factor = nn.Linear(7, 7, dtype=torch.float64).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.factor(x)


def adapt(model: Net, *, renames: bool) -> None:
    """Put a frozen adapter on the second layer, or a frozen module beside the layers that none calls."""
    torch.manual_seed(8)
    adapted = Adapted(model.layers[1])
    if renames:
        model.layers[1] = adapted
    else:
        model.beside = adapted.factor


class Run:
    """Steps of one model; under an engine if there is a stage."""

    def __init__(self, stage: int | None) -> None:
        self.model = build()
        self.stage = stage
        self.share = slice(None)
        self.start()

    def start(self) -> None:
        self.optimizer: Any = make(self.model, False)
        if self.stage is not None:
            zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
            config = {"zero_optimization": zero, "gradient_clipping": 0.0}
            self.engine = hf_zero.initialize(model=self.model, optimizer=self.optimizer, config=config)[0]
            self.share = slice(self.engine.rank, None, self.engine.world_size)

    def step(self, number: int) -> None:
        self.model(rows(number)[self.share]).square().mean().backward()
        if self.stage is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.engine.step()

    def weights(self) -> dict[str, torch.Tensor]:
        if self.stage is not None:
            return self.engine.full_state_dict(keep=True)
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def with_late_adapter(stage: int | None) -> list[dict[str, torch.Tensor]]:
    """Weights while the adapter is frozen, after other weights were loaded, and after a new start with it."""
    run = Run(stage)
    run.step(0)
    adapt(run.model, renames=True)
    run.step(1)
    seen = [run.weights()]
    if stage is None:
        run.model.load_state_dict({name: value * 0.5 for name, value in seen[0].items()})
    else:
        run.engine.load_full_state_dict({name: value * 0.5 for name, value in seen[0].items()})
    run.step(2)
    seen.append(run.weights())
    run.model.layers[1].factor.requires_grad_(True)
    if stage is not None:
        for _ in range(2):  # it stays an error
            with pytest.raises(StateError, match=r"layers\.1\.factor\.weight, "):
                run.step(3)
    run.start()
    for number in (3, 4):
        run.step(number)
    return [*seen, run.weights()]


@pytest.mark.parametrize("stage", range(4))
def test_adapters_that_come_late_stay_frozen_or_are_refused_until_a_new_start(stage: int) -> None:
    want = with_late_adapter(None)
    factors = [weights["layers.1.factor.weight"] for weights in want]
    assert torch.equal(factors[1], factors[0] * 0.5) and not torch.equal(factors[2], factors[1])
    for got in run_ranks(with_late_adapter, 2, stage):
        for mine, theirs in zip(got, want, strict=True):
            assert list(mine) == list(theirs)
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-12, msg=name)


def saved_late(stage: int, folder: str) -> list[bool]:
    run = Run(stage)
    run.step(0)
    adapt(run.model, renames=False)
    run.step(1)
    run.engine.save_checkpoint(folder)
    weights = run.weights()
    again = Run(stage)
    adapt(again.model, renames=False)
    with torch.no_grad():
        again.model.beside.weight.zero_()
    again.engine.load_checkpoint(folder)
    same = [torch.equal(value, weights[name]) for name, value in again.weights().items()]
    adapt(run.model, renames=True)
    run.step(2)
    with pytest.raises(StateError, match=r"layers\.1\.weight \(layers\.1\.base\.weight\)"):
        run.engine.save_checkpoint(folder + "/renamed")
    return same


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters_that_came_late_are_in_checkpoints(stage: int, tmp_path: Any) -> None:
    assert all(len(same) == 9 and all(same) for same in run_ranks(saved_late, 2, stage, str(tmp_path)))


# ---------------------------------------------------------------- on some ranks only
def set_on_one_rank(stage: int, wanted: bool) -> None:
    model = build()
    model.layers[0].requires_grad_(wanted is False)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "desync_timeout": 20,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    for number in range(3):
        if number == 1 and engine.rank == 1:
            model.layers[0].requires_grad_(wanted)
        engine.backward(engine(rows(number)).square().mean())
        engine.step()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("wanted", [False, True])
def test_one_rank_alone(stage: int, wanted: bool) -> None:
    for failure in run_ranks(set_on_one_rank, 2, stage, wanted, expect_error=True):
        assert isinstance(failure, RankFailure) and isinstance(failure.exception, ZeroError), failure
        if not wanted:
            assert "layers.0.weight requires no gradient on rank(s) 1" in failure.message
