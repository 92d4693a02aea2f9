"""bf16 and fp16 with fp32 masters, parameters of mixed types, and autocast over fp32, against a one-process emulation.

The emulation runs every rank's micro-batch with the same types and shapes as the rank does, so the gradients that
enter an update are equal to the bit until an fp32 sum over ranks, taken in another order, tips a weight over to the
next bf16 value. The tolerances leave room for a few of those and for nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case, Trace, train_reference
from tests.harness.sharded import Options, micro_step, record, start

STAGES = (0, 1, 2, 3)
STEPS = 3  # stage 3 gathers ahead from the second on, and keeps layers for backward from the third


def _all_with_the_first(first: Any, second: Any) -> list[Any]:
    """Every model in the first of two ways to train it; in the second one `plain`, and the others at night."""
    models = ("plain", "tied", "frozen", "twice", "reentrant", "non_reentrant")
    rows = [pytest.param(first, model, marks=[] if model == "plain" else pytest.mark.slow) for model in models]
    night = [pytest.mark.slow, pytest.mark.nightly]
    return [*rows, *(pytest.param(second, model, marks=night[: 1 + (model != "plain")]) for model in models)]


@dataclasses.dataclass(frozen=True)
class Precision:
    bf16: bool = False  # parameters in bf16, masters in fp32
    fp16_scale: float = 0.0  # parameters in fp16, masters in fp32, losses times this; 0: no fp16
    keep_fp32: tuple[str, ...] = ()
    autocast: bool = False
    cache: bool = True  # autocast's

    @property
    def config(self) -> tuple[tuple[str, Any], ...]:
        entries: tuple[tuple[str, Any], ...] = (("bf16", {"enabled": True}),) if self.bf16 else ()
        if self.fp16_scale:
            entries = (("fp16", {"enabled": True, "loss_scale": self.fp16_scale}),)
        return (*entries, ("keep_fp32", list(self.keep_fp32))) if self.keep_fp32 else entries

    def dtype_of(self, name: str) -> torch.dtype:
        kept = any(fnmatch.fnmatch(name, pattern) for pattern in self.keep_fp32)
        if kept:
            return torch.float32
        return torch.float16 if self.fp16_scale else torch.bfloat16 if self.bf16 else torch.float32

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.float() * self.fp16_scale if self.fp16_scale else loss

    def context(self) -> Any:
        return (
            torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cache)
            if self.autocast
            else contextlib.nullcontext()
        )


def emulate(case: Case, precision: Precision) -> Trace:
    """One process: the gradients of every rank's micro-batches, summed in fp32, update fp32 masters.

    Parameters are casts of the masters. What is frozen is cast once and has no master.
    """
    model = case.build(torch.float32)
    masters = {}
    for name, param in model.named_parameters():
        cast = param.data.to(precision.dtype_of(name))
        masters[name] = nn.Parameter(param.data.clone() if param.requires_grad else cast.float(), param.requires_grad)
        param.data = cast
    holder = nn.ParameterDict({name.replace(".", "/"): param for name, param in masters.items()})
    optimizer = case.make_optimizer(holder)
    trace = Trace(params=[{name: master.detach().clone() for name, master in masters.items()}])
    for step in range(case.steps):
        losses = []
        for micro in range(case.accumulation):
            for rank in range(case.world):
                with precision.context():
                    loss = model(**case.batch(step, micro, rank))["loss"]
                precision.scaled(loss).backward()
                losses.append(loss.item())
                _collect(model, masters, 1 / (case.world * case.accumulation * (precision.fp16_scale or 1)))
        trace.losses.append(sum(losses) / len(losses))
        trace.norms.append(float(nn.utils.clip_grad_norm_(masters.values(), case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        trace.params.append({name: master.detach().clone() for name, master in masters.items()})
    return trace


def _collect(model: nn.Module, masters: dict[str, nn.Parameter], scale: float) -> None:
    for name, param in model.named_parameters():
        if param.grad is not None:
            grad = param.grad.float() * scale
            masters[name].grad = grad if masters[name].grad is None else masters[name].grad + grad
            param.grad = None


def train(case: Case, precision: Precision, stages: tuple[int, ...], direct: bool = False) -> list[Trace]:
    return [_train_one(case, precision, Options(stage, direct, config=precision.config)) for stage in stages]


def _train_one(case: Case, precision: Precision, options: Options) -> Trace:
    engine = start(case, options)
    trace = Trace(params=[{}])
    for step in range(case.steps):
        losses = []
        for micro in range(case.accumulation):
            with precision.context():
                loss = engine(**case.batch(step, micro, dist.get_rank()))["loss"]
            if options.direct_backward:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        record(trace, engine, losses)
        weights = trace.params[-1]
        for name, value in weights.items():
            if name != "scale":
                assert value.dtype == precision.dtype_of(name), name
        trace.params[-1] = _whole_masters(engine, weights)
    return trace


def _whole_masters(engine: ZeroEngine, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Masters put together from all ranks' shards. The parameters must be casts of them, to the bit."""
    whole: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        for buffer in unit.flats:
            master = buffer.master if buffer.master is not None else buffer.shard
            for run in buffer.layout.slices(buffer.rank):
                target = whole.setdefault(run.name, torch.full(run.shape, float("nan"))).view(-1)
                values = master.read_slice(run).split([piece.numel for piece in run.pieces])
                for piece, value in zip(run.pieces, values, strict=True):
                    target[piece.start : piece.end] = value
                    cast = weights[run.name].view(-1)[piece.start : piece.end]
                    assert torch.equal(value.to(cast.dtype), cast), f"{run.name} is not the cast of its master"
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, whole)
    merged: dict[str, torch.Tensor] = {}
    for shards in gathered:
        for name, value in shards.items():
            merged[name] = torch.where(value.isnan(), merged.get(name, value), value)
    return merged


def assert_close(case: Case, want: Trace, got: Trace, label: str) -> None:
    assert got.losses == pytest.approx(want.losses, rel=2e-3), label
    assert got.norms == pytest.approx(want.norms, rel=1e-2), label
    for step in range(case.steps):
        far = total = 0
        for name, expected in want.params[step + 1].items():
            difference = (got.params[step + 1][name] - expected).abs()
            # Adam moves by at most about lr per step, in either direction.
            assert difference.max() <= 2.2 * case.lr * (step + 1), f"{label}: {name} after step {step}"
            far += int((difference > 1e-3 * case.lr).sum())
            total += difference.numel()
        assert far <= 0.01 * total, f"{label}: {far} of {total} elements off after step {step}"
    trainable = [name for name, param in case.build().named_parameters() if param.requires_grad]
    moved = [not torch.equal(want.params[0][name], want.params[-1][name]) for name in trainable]
    assert sum(moved) >= 0.8 * len(moved) and len(set(want.losses)) == case.steps and min(want.norms) > case.clip


@pytest.mark.parametrize(("optimizer", "model"), _all_with_the_first("adamw", "sgd"))
def test_bf16_with_fp32_masters(optimizer: str, model: str) -> None:
    case, precision = Case(model, 2, 2, optimizer, STEPS, single=True), Precision(bf16=True)
    want = emulate(case, precision)
    # bf16 keeps 8 bits: it follows the fp64 run roughly.
    assert want.losses == pytest.approx(train_reference(case).losses, rel=3e-2)
    for stage, got in zip(STAGES, run_ranks(train, 2, case, precision, STAGES)[0], strict=True):
        assert_close(case, want, got, f"stage {stage}")
        extra_bits = [not torch.equal(value, value.bfloat16().float()) for value in got.params[-1].values()]
        assert any(extra_bits), "the masters hold no more than the parameters"


@pytest.mark.parametrize(("call", "model"), _all_with_the_first("engine.backward", "loss.backward"))
def test_fp16_with_fp32_masters(call: str, model: str) -> None:
    case, precision = Case(model, 2, 2, "adamw", STEPS, single=True), Precision(fp16_scale=128.0)
    want = emulate(case, precision)
    assert want.losses == pytest.approx(train_reference(case).losses, rel=1e-2)
    for stage, got in zip(
        STAGES, run_ranks(train, 2, case, precision, STAGES, call == "loss.backward")[0], strict=True
    ):
        assert_close(case, want, got, f"stage {stage}")
        extra_bits = [not torch.equal(value, value.half().float()) for value in got.params[-1].values()]
        assert any(extra_bits), "the masters hold no more than the parameters"


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_bf16_at_other_world_sizes(world: int) -> None:
    case, precision = Case("plain", world, 1, "adamw", STEPS, single=True), Precision(bf16=True)
    want = emulate(case, precision)
    for stage, got in zip(STAGES, run_ranks(train, world, case, precision, STAGES)[0], strict=True):
        assert_close(case, want, got, f"stage {stage}")


@pytest.mark.slow
def test_parameters_kept_in_fp32() -> None:
    """Two types in one unit: norms stay fp32 in a bf16 model."""
    case, precision = Case("plain", 2, 1, "adamw", STEPS, single=True), Precision(bf16=True, keep_fp32=("*norm*",))
    want = emulate(case, precision)
    for stage, got in zip(STAGES, run_ranks(train, 2, case, precision, STAGES)[0], strict=True):
        assert_close(case, want, got, f"stage {stage}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    ["twice", "reentrant", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("plain", "tied", "non_reentrant"))],
)
def test_autocast_over_fp32(model: str) -> None:
    case, precision = Case(model, 2, 2, "adamw", STEPS, single=True), Precision(autocast=True)
    want = emulate(case, precision)
    # One process casts a weight that is used twice once, and adds its two gradients in 16 bits. At stage 3 it is
    # released in between and cast again, as without autocast's cache: the two are added in fp32.
    uncached = emulate(case, dataclasses.replace(precision, cache=False))
    for stage, got in zip(STAGES, run_ranks(train, 2, case, precision, STAGES)[0], strict=True):
        assert_close(case, uncached if stage == 3 else want, got, f"stage {stage}")


# ---------------------------------------------------------------- how gradients are summed
def sum_small_gradients(stage: int, accum: str | None) -> torch.Tensor:
    """The parameter after SGD with lr 1 on 256 micro-gradients of 1e-3 / 256 each, beside a first one of 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    steps = 256
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": steps,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if accum is not None:
        config["data_types"] = {"grad_accum_dtype": accum}
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)[0]
    for micro in range(steps):
        engine.backward(engine(torch.full((1, 1), 1.0 if micro == 0 else 2.0**-10)).sum())
        engine.step()
    return next(buffer.master.memory.clone() for unit in engine.units for buffer in unit.flats if buffer.master)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_accumulate_in_fp32_unless_told_otherwise(stage: int) -> None:
    exact = (1 + 255 * 2.0**-10) / 256
    default = run_ranks(sum_small_gradients, 2, stage, None)[0]
    assert -float(default[0]) == pytest.approx(exact, rel=1e-3)
    lossy = run_ranks(sum_small_gradients, 2, stage, "bf16")[0]
    assert abs(-float(lossy[0]) - exact) > 0.05 * exact, "bf16 cannot hold such sums: was it used?"


def train_plain(case: Case, options: Options) -> list[float]:
    engine = start(case, options)
    return [micro_step(engine, case, step, 0, options) for step in range(case.steps)]


@pytest.mark.slow
def test_bf16_gradients_still_train() -> None:
    case = Case("plain", 2, 1, "adamw", single=True)
    config = (("bf16", {"enabled": True}), ("data_types", {"grad_accum_dtype": "bf16"}))
    by_stage = [run_ranks(train_plain, 2, case, Options(stage, config=config))[0] for stage in STAGES]
    for losses in by_stage[1:]:
        assert losses == pytest.approx(by_stage[0], rel=1e-2)
