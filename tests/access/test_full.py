"""gathered_params: what it takes, whose edits are kept, and what happens when ranks do not do the same."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from tests.access.test_local import Net, rows
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.slow  # many short ones

W0, W1 = "layers.0.weight", "layers.1.weight"
BF16 = {"bf16": {"enabled": True}}


def start(stage: int, *, freeze: bool = True, **more: Any) -> ZeroEngine:
    torch.manual_seed(3)
    model = Net()
    model.frozen.requires_grad_(not freeze)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": zero, **more})[0]


def state(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    return engine.full_state_dict(keep=True)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


# -------------------------------------------------------------------- what it takes
def targets(stage: int) -> None:
    engine = start(stage)
    model: Any = engine.module
    want = state(engine)
    torch.manual_seed(5)
    second = hf_zero.shard(Net(), {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
    other = hf_zero.engine_of(second)
    assert other is not None
    plain = nn.Parameter(torch.ones(3))
    gathers = {}
    for what, target in {
        "model": model,
        "module": model.layers[1],
        "parameter": model.layers[1].weight,
        "list": [model.layers[0], model.layers[1].bias, plain],
        "generator": (param for param in (model.layers[1].weight, second.layers[2].weight)),
    }.items():
        engine.comm.counts.clear()
        other.comm.counts.clear()
        with hf_zero.gathered_params(target):
            if what != "list":
                assert torch.equal(model.layers[1].weight, want[W1]), what
            if what == "generator":
                assert not second.layers[2].weight.isnan().any()
                assert stage < 3 or model.layers[0].weight.isnan().all()
        gathers[what] = engine.comm.counts["all_gather"].calls, other.comm.counts["all_gather"].calls
    if stage == 3:
        units = len(engine.units)
        buffers = sum(len(unit.flats) for unit in engine.units)
        assert units == 4 and gathers["model"] == (buffers, 0)
        assert gathers["module"] == gathers["parameter"] == (1, 0), "one unit only"
        assert gathers["list"] == (2, 0) and gathers["generator"] == (1, 1)
    with hf_zero.gathered_params([plain], write_rank=0), torch.no_grad():
        plain.fill_(2.0 + engine.rank)
    assert plain[0] == 2.0 + engine.rank, "a plain parameter is its own rank's"
    engine.comm.counts.clear()
    assert torch.equal(hf_zero.full_param(model, W1), want[W1])
    assert engine.comm.counts["all_gather"].calls == (1 if stage == 3 else 0)
    with hf_zero.gathered_params(model), torch.no_grad():  # a forward inside leaves the parameters whole
        model(rows(0).float())
        assert same(dict(model.named_parameters()), want)
    with (
        pytest.raises(hf_zero.ConfigError, match="nobody, nothing"),
        hf_zero.gathered_params(model, ["nothing", W0, "nobody"]),
    ):
        pass
    with pytest.raises(hf_zero.ConfigError, match="ranks are 0 to 1"), hf_zero.gathered_params(model, write_rank=2):
        pass


@pytest.mark.parametrize("stage", [2, 3])
def test_models_parameters_and_iterables(stage: int) -> None:
    run_ranks(targets, 2, stage)


# -------------------------------------------------------------------- edits
def edits(stage: int, config: dict[str, Any]) -> None:
    engine = start(stage, **config)
    model: Any = engine.module
    want = state(engine)

    def unchanged(match: str, kind: type[Exception] = hf_zero.StateError) -> Any:
        return pytest.raises(kind, match=match)

    # kept: in place, through .data, by another tensor, of a frozen parameter too
    with hf_zero.gathered_params([model.layers, model.frozen], write_rank=1), torch.no_grad():
        if engine.rank == 1:
            model.layers[0].weight.mul_(2.0)
            model.layers[1].weight.data[2, 3] = 4.0
            model.layers[2].weight.data = torch.ones_like(model.layers[2].weight)
            model.frozen.fill_(0.5)
    want[W0] = want[W0] * 2.0
    want[W1][2, 3] = 4.0
    want["layers.2.weight"] = torch.ones_like(want[W1])
    want["frozen"] = torch.full_like(want["frozen"], 0.5)
    assert same(state(engine), want)
    with hf_zero.gathered_params(model, write_rank=0), torch.no_grad():  # the same edit everywhere is no loss
        model.layers[0].weight.fill_(0.125)
    want[W0] = torch.full_like(want[W0], 0.125)
    assert same(state(engine), want)

    with unchanged(rf"edits of rank 0 alone[^\0]*rank 1: {W1}"), hf_zero.gathered_params(model, write_rank=0):
        model.layers[0].weight.data.fill_(9.0)
        if engine.rank == 1:
            model.layers[1].weight.data[0, :2] = model.layers[1].weight.data[0, :2].flip(0)
    assert same(state(engine), want), "no edit of a refused block is kept"
    kind = ValueError if engine.rank == 0 else hf_zero.StateError
    with unchanged("mine", kind), hf_zero.gathered_params(model, write_rank=0), torch.no_grad():
        model.layers[0].weight.fill_(9.0)
        if engine.rank == 0:
            raise ValueError("mine")
    assert same(state(engine), want), "half an edit is none"
    with unchanged("keeps its shape"), hf_zero.gathered_params(model, write_rank=0):
        model.layers[0].weight.data = torch.zeros(3)
    assert same(state(engine), want)
    with unchanged("other parameters"), hf_zero.gathered_params(model, [W0 if engine.rank else W1]):
        pass
    with pytest.raises(ValueError, match="reading"), hf_zero.gathered_params(model):
        raise ValueError("reading")
    # it goes on as if nothing had been
    engine.backward(engine(rows(0).float().chunk(2)[engine.rank]))
    with hf_zero.gathered_params(model):
        assert same(dict(model.named_parameters()), want)
    engine.step()
    after = state(engine)
    assert not torch.equal(after[W1], want[W1]) and not after[W1].isnan().any()


@pytest.mark.parametrize("config", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1))])
def test_edits(stage: int, config: dict[str, Any]) -> None:
    run_ranks(edits, 2, stage, config)


def trained_after_an_edit(stage: int, config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
    """The masters follow: training goes on from the edit."""
    engine = start(stage, **config)
    model: Any = engine.module
    with hf_zero.gathered_params(model.layers[0], write_rank=0), torch.no_grad():
        if engine.rank == 0:
            model.layers[0].weight.fill_(0.25)
    engine.backward(engine(rows(0).float().chunk(2)[engine.rank]))
    engine.step()
    return state(engine), float(model(rows(1).float()).detach())


@pytest.mark.parametrize("stage", [2, 3])
def test_training_goes_on_from_an_edit(stage: int) -> None:
    torch.manual_seed(3)
    model: Any = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with torch.no_grad():
        model.layers[0].weight.fill_(0.25)
    model(rows(0).float()).backward()
    optimizer.step()
    for got, _ in run_ranks(trained_after_an_edit, 2, stage, {}):
        for name, value in model.named_parameters():
            assert torch.allclose(got[name], value.detach(), atol=2e-6), name


def reading_is_not_writing(stage: int) -> str:
    engine = start(stage)
    with pytest.raises(hf_zero.StateError) as caught, hf_zero.gathered_params(engine.module), torch.no_grad():
        if engine.rank == 1:
            engine.module.layers[0].weight.fill_(1.0)
    loss = engine(rows(0).float().chunk(2)[engine.rank])
    with pytest.raises((hf_zero.StateError, RuntimeError), match=r"between forward|modified by an inplace"):
        with hf_zero.gathered_params(engine.module.layers[1].weight, write_rank=0), torch.no_grad():
            if engine.rank == 0:
                engine.module.layers[1].weight.fill_(1.0)
        engine.backward(loss)
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_write_without_write_rank_or_too_late_raises(stage: int) -> None:
    texts = run_ranks(reading_is_not_writing, 2, stage)
    assert texts[0] == texts[1] and f"rank 1: {W0}" in texts[0] and "rank 0" not in texts[0]


# -------------------------------------------------------------------- one inside another
def nested(stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights after some edits, and after a step from there."""
    engine = start(stage)
    model: Any = engine.module
    layers, rank, gathered = model.layers, engine.rank, hf_zero.gathered_params
    want = state(engine)

    def shows(**edits: torch.Tensor) -> None:
        want.update({name.replace("_", "."): value for name, value in edits.items()})
        assert same(dict(model.named_parameters()), want), "every rank sees the edit in the outer block"

    with gathered(model), torch.no_grad():
        with gathered(layers[0], write_rank=1):  # a part of the model
            if rank == 1:
                layers[0].weight.mul_(2.0)
        shows(layers_0_weight=want[W0] * 2.0)
        with gathered(model, write_rank=0):  # another rank, all of the model
            if rank == 0:
                layers[1].weight.data[2, 3] = 4.0
                model.frozen.data = torch.full_like(model.frozen, 0.5)
        want[W1][2, 3] = 4.0
        shows(frozen=torch.full_like(want["frozen"], 0.5))
        with pytest.raises(hf_zero.StateError, match="edits of rank 0 alone"), gathered(model, write_rank=0):
            layers[0].weight.add_(1.0 + rank)
        shows()
        with pytest.raises(hf_zero.StateError, match="inside another"):
            hf_zero.set_full_param(model, torch.zeros(7, 7), W0)
        shows()
    with gathered(layers[0]), gathered(layers[1]), gathered(layers, write_rank=0), gathered(model), torch.no_grad():
        pass
    with gathered(layers[0]), gathered(layers, write_rank=1), torch.no_grad():  # more than the outer one shows
        if rank == 1:
            layers[0].bias.fill_(0.25)
            layers[2].bias.fill_(0.125)
    want["layers.0.bias"] = torch.full_like(want["layers.0.bias"], 0.25)
    want["layers.2.bias"] = torch.full_like(want["layers.2.bias"], 0.125)
    assert same(state(engine), want)
    with gathered(model, write_rank=1), torch.no_grad():  # the outer one writes
        if rank == 1:
            layers[2].weight.fill_(0.375)
        with gathered(layers):
            assert rank == 0 or layers[2].weight.eq(0.375).all()
    want["layers.2.weight"] = torch.full_like(want["layers.2.weight"], 0.375)
    assert same(state(engine), want)
    for other in (0, 1):
        with pytest.raises(hf_zero.StateError, match="inside another"), gathered(model, write_rank=0):
            if rank == 0:
                layers[2].weight.data.fill_(9.0)
            with gathered(layers[0], write_rank=other):
                raise AssertionError("two blocks would write to one layer")
    before = state(engine)
    assert same(before, want)
    engine.backward(engine(rows(0).float().chunk(2)[rank]))
    engine.step()
    return before, state(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_block_that_writes_inside_one_for_reading(stage: int) -> None:
    for before, after in run_ranks(nested, 2, stage):
        model: Any = Net()
        model.load_state_dict(before)
        model.frozen.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model(rows(0).float()).backward()
        optimizer.step()
        for name, value in model.named_parameters():
            assert torch.allclose(after[name], value.detach(), atol=2e-6), name
        assert not torch.equal(after[W0], before[W0])


def strays(stage: int) -> list[str]:
    """Return the writes that the outer block must notice, beside those that an inner one keeps."""
    engine = start(stage)
    model: Any = engine.module
    texts = []
    for inside in (False, True):
        with pytest.raises(hf_zero.StateError) as caught, hf_zero.gathered_params(model), torch.no_grad():
            if engine.rank == 1 and not inside:
                model.layers[1].weight.fill_(1.0)
            with hf_zero.gathered_params(model.layers[:1] if inside else model, write_rank=0):
                if engine.rank == 0:
                    model.layers[0].weight.fill_(0.75)
                if engine.rank == 1 and inside:
                    model.layers[2].weight.fill_(1.0)
        texts.append(str(caught.value))
        assert state(engine)[W0].eq(0.75).all()
    return texts


@pytest.mark.parametrize("stage", [1, 3])
def test_a_block_for_reading_notices_writes_around_one_that_writes(stage: int) -> None:
    for first, second in run_ranks(strays, 2, stage):
        assert f"rank 1: {W1}" in first and W0 not in first, first
        assert "rank 1: layers.2.weight" in second and W0 not in second, second


# -------------------------------------------------------------------- one rank alone
def alone(call: str) -> float:
    engine = start(3)
    model = engine.module
    begun = time.monotonic()
    if engine.rank == 0:
        with pytest.raises(hf_zero.StateError, match=r"rank\(s\) \[1\] did not"):
            if call == "gathered":
                with hf_zero.gathered_params(model):
                    pass
            elif call == "set":
                hf_zero.set_full_param(model, torch.zeros(7, 7), W0)
            else:
                hf_zero.full_param(model, W0)
    return time.monotonic() - begun


@pytest.mark.parametrize("call", ["gathered", "param", "set"])
def test_on_one_rank_alone_it_raises(call: str) -> None:
    assert run_ranks(alone, 2, call, timeouts={"presence": 1})[0] < 5


# -------------------------------------------------------------------- model to model
def two_models(stage: int, other: dict[str, Any], dtype: torch.dtype, *, freeze: bool) -> tuple[ZeroEngine, nn.Module]:
    """A policy, where `freeze` says so with a frozen parameter, which cuts its root unit in two; and a reference."""
    engine = start(stage, freeze=freeze)
    torch.manual_seed(8)
    second = Net().to(dtype)
    if other:
        zero = {"stage3_param_persistence_threshold": 0, **other}
        hf_zero.shard(second, {"zero_optimization": zero})
    return engine, second


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    engine = hf_zero.engine_of(model)
    state = model.state_dict() if engine is None else engine.full_state_dict(keep=True)
    return {name: value.detach().clone() for name, value in state.items()}


def copied(stage: int, other: dict[str, Any], dtype: torch.dtype, direction: str) -> dict[str, int]:
    engine, second = two_models(stage, other, dtype, freeze=False)
    source, target = (engine.module, second) if direction == "to" else (second, engine.module)
    ours, theirs = hf_zero.engine_of(source), hf_zero.engine_of(target)
    engines = [one for one in (ours, theirs) if one is not None]
    was, give = whole(target), whole(source)
    assert not torch.equal(was[W0], give[W0].to(was[W0].dtype))
    hf_zero.copy_weights(source, target, tau=0.25)
    for name, value in whole(target).items():
        want = torch.lerp(was[name].float(), give[name].float(), 0.25).to(value.dtype)
        assert torch.allclose(value, want, rtol=1e-6), name
        assert torch.allclose(value.double(), 0.25 * give[name].double() + 0.75 * was[name].double(), rtol=1e-2), name
    for one in engines:
        one.comm.counts.clear()
    hf_zero.copy_weights(source, target)
    moved = sum(count.calls for one in engines for count in one.comm.counts.values())
    for name, value in whole(target).items():
        assert torch.equal(value, give[name].to(value.dtype)), name
    assert same(whole(source), give)
    if target is engine.module:  # training goes on from there
        engine.backward(engine(rows(0).float().chunk(engine.world_size)[engine.rank]))
        engine.optimizer.param_groups[0]["lr"] = 0.0  # type: ignore[union-attr]
        engine.step()
        for name, value in whole(target).items():
            assert torch.equal(value, give[name].to(value.dtype)), name
    return {"moved": moved}


REFERENCES: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "whole": {"stage": 0},
    "other buckets": {"stage": 3, "reduce_bucket_size": 16, "allgather_bucket_size": 16},
    "plain": {},
}


@pytest.mark.parametrize(
    ("stage", "other", "dtype", "direction", "local"),
    [
        (3, "stage 3", torch.float32, "to", True),
        (2, "stage 3", torch.float32, "to", True),
        (3, "whole", torch.float32, "to", False),
        (3, "other buckets", torch.bfloat16, "to", False),
        (3, "stage 3", torch.float32, "from", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (3, "stage 3", torch.bfloat16, "to", True),
                (0, "whole", torch.float32, "to", True),
                (2, "whole", torch.bfloat16, "to", True),
                (3, "plain", torch.float32, "to", False),
                (3, "plain", torch.float32, "from", True),
                (2, "stage 3", torch.bfloat16, "from", False),
                (2, "plain", torch.float32, "from", True),
                (1, "other buckets", torch.float32, "from", False),
            )
        ),
    ],
)
def test_weights_go_from_model_to_model(
    stage: int, other: str, dtype: torch.dtype, direction: str, local: bool
) -> None:
    for got in run_ranks(copied, 2, stage, REFERENCES[other], dtype, direction):
        assert (got["moved"] == 0) == local, got


def synced(stage: int) -> list[dict[str, torch.Tensor]]:
    """A reference that follows the policy every second step."""
    engine, reference = two_models(stage, {"stage": 3}, torch.float32, freeze=True)
    hf_zero.copy_weights(engine.module, reference)
    seen = []
    for step in range(4):
        with torch.no_grad():
            base = reference(rows(step).float())
        loss = (engine(rows(step).float().chunk(2)[engine.rank]) - base).square()
        engine.backward(loss)
        engine.step()
        if step % 2:
            hf_zero.copy_weights(engine.module, reference, tau=0.6)
        seen.append(whole(reference))
    return seen


@pytest.mark.parametrize("stage", [2, 3])
def test_a_reference_follows_the_policy(stage: int) -> None:
    torch.manual_seed(3)
    policy = Net()
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    by_rank = run_ranks(synced, 2, stage)
    moved = 0
    for step in range(4):
        with torch.no_grad():
            base = reference(rows(step).float())
        halves = rows(step).float().chunk(2)
        optimizer.zero_grad()
        torch.stack([(policy(half) - base).square() for half in halves]).mean().backward()
        optimizer.step()
        if step % 2:
            with torch.no_grad():
                for mine, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
                    moved += int(not torch.equal(mine, theirs))
                    mine.lerp_(theirs, 0.6)
        for seen in by_rank:
            for name, value in reference.named_parameters():
                assert torch.allclose(seen[step][name], value.detach(), rtol=1e-4, atol=1e-5), f"{name}, step {step}"
    assert moved > 6, "vacuous"


def misfits() -> None:
    engine = start(3)

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(7, 5)])
            self.more = nn.Parameter(torch.ones(2))

    with pytest.raises(hf_zero.ConfigError, match=r"more: not in the source\s+layers\.0\.weight: shape \(7, 7\)"):
        hf_zero.copy_weights(engine.module, Other())
    with pytest.raises(hf_zero.ConfigError, match="tau=2"):
        hf_zero.copy_weights(engine.module, Net(), tau=2)
    with pytest.raises(hf_zero.StateError, match="one parameter in both"):
        hf_zero.copy_weights(engine.module, engine.module)


def test_models_that_do_not_fit_are_named() -> None:
    run_ranks(misfits, 2)
