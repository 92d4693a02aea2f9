"""Ranks that use different units of equal size: never another unit's weights or gradients, at any stage.

In the forward of the model and its backward the result is that of one process. Layers that are called without the
model end in DivergenceError on every rank where they differ.
"""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import hf_zero
from hf_zero.distributed import comm as comm_module
from hf_zero.distributed.operation_log import OperationCheck, OperationLog, difference_of
from hf_zero.distributed.timeouts import TIMEOUTS
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import DivergenceError, StateError
from tests.harness.ranks import RankFailure, run_ranks

BLOCKS, WIDTH = 5, 6
Choice = list[int]  # blocks, in the order of their use


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Chooser(nn.Module):
    """Runs the blocks that its input names: LayerDrop, experts in a ModuleList, early exits."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        x = self.inp(x)
        for index in choice:
            x = self.blocks[index](x)
        loss: torch.Tensor = self.out(x).square().mean()
        return loss


def build() -> Chooser:
    torch.manual_seed(0)
    return Chooser().double()


def batch(case: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * case + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def choices(random_: random.Random, base: Choice, world: int) -> list[Choice]:
    """Choose what every rank runs: the same, or nearly the same, or anything."""
    how = random_.choice(["same", "same", "near", "near", "anything"])
    by_rank = []
    for _ in range(world):
        mine = list(base)
        if how == "anything":
            mine = [random_.randrange(BLOCKS) for _ in range(random_.randint(1, 5))]
        elif how == "near":
            at = random_.randrange(len(mine))
            change = random_.choice(["replace", "swap", "drop", "add", "keep"])
            if change == "replace":
                mine[at] = random_.randrange(BLOCKS)
            elif change == "swap":
                mine[at], mine[0] = mine[0], mine[at]
            elif change == "drop" and len(mine) > 1:
                del mine[at]
            elif change == "add":
                mine.insert(at, random_.randrange(BLOCKS))
        by_rank.append(mine)
    return by_rank


def start(stage: int, zero: dict[str, Any]) -> ZeroEngine:
    model = build()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "desync_timeout": 30,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    return hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), config=config)[0]


def run_cases(stage: int, zero: dict[str, Any], seed: int, count: int) -> int:
    """Run cases; return how often ranks left the order that all had in the pass before."""
    engine, plain = start(stage, zero), build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    random_ = random.Random(seed)
    base, departures = [0], 0
    for case in range(count):
        if case % 5 == 0:  # as in another engine, ranks know no order, and take the next one for that of all passes
            engine.params.orders.clear()
            base = [random_.randrange(BLOCKS) for _ in range(random_.randint(1, 5))]
        by_rank, trains = choices(random_, base, engine.world_size), random_.random() < 0.7
        shared = [order for order in engine.params.orders.values() if order.is_shared]
        try:
            _run_case(engine, plain, case, by_rank, trains)
        except BaseException as error:
            error.add_note(f"case {case}, {'training' if trains else 'evaluation'}, {by_rank}")
            raise
        departures += any(order.differs for order in shared)
        if trains:
            losses = [plain(batch(case, rank), choice) for rank, choice in enumerate(by_rank)]
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = engine.full_state_dict(keep=True)
        assert weights is not None
        apart = {name: (weights[name] - value).abs().max().item() for name, value in plain.state_dict().items()}
        assert all(difference <= 1e-9 for difference in apart.values()), f"case {case}, {by_rank}: {apart}"
    moved = [not torch.equal(new, old) for new, old in zip(plain.parameters(), build().parameters(), strict=True)]
    assert all(moved), "the reference has not trained"
    return departures


def _run_case(engine: ZeroEngine, plain: Chooser, case: int, by_rank: list[Choice], trains: bool) -> None:
    mine = by_rank[engine.rank]
    with torch.set_grad_enabled(trains):
        loss = engine(batch(case, engine.rank), mine)
    with torch.no_grad():
        want = plain(batch(case, engine.rank), mine)
    torch.testing.assert_close(loss.detach(), want, rtol=1e-9, atol=1e-9, msg=f"loss of case {case}, {by_rank}")
    if trains:
        engine.backward(loss)
        engine.step()


PREFETCH = {"stage3_prefetch_bucket_size": 10**6}
NO_PREFETCH = {"stage3_prefetch_bucket_size": 0}
KEEPS = {"stage3_max_reuse_distance": 10**9}
RELEASES = {"stage3_max_reuse_distance": 0}
# 1,000 cases; those of three ranks take twice as long.
SETTINGS: list[tuple[int, dict[str, Any], dict[int, int]]] = [
    *((3, {**ahead, **reuse}, {2: 160, 3: 40}) for ahead in (PREFETCH, NO_PREFETCH) for reuse in (KEEPS, RELEASES)),
    (3, {**PREFETCH, **RELEASES, "reduce_scatter": False}, {2: 45, 3: 15}),
    *((stage, {}, {2: 50, 3: 20}) for stage in (1, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@pytest.mark.parametrize(("world", "part"), [(2, 0.3), (3, 1.0), pytest.param(2, 1.0, marks=pytest.mark.nightly)])
def test_another_unit_is_never_taken_for_the_one_that_is_used(setting: int, world: int, part: float) -> None:
    stage, zero, counts = SETTINGS[setting]
    count = int(part * counts[world])
    departures = run_ranks(run_cases, world, stage, zero, 100 * setting + world, count, timeout=240)
    assert min(departures) >= (count // 12 if stage == 3 else 0)


def call_again_and_again(checkpoint: bool | None) -> tuple[float, float]:
    """A block on its own output, as in models that share one layer; all ranks alike."""
    engine, plain = start(3, {**PREFETCH, **RELEASES}), build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    if checkpoint is not None:
        for block in engine.module.blocks:
            call = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=checkpoint)
            block.forward = call
    choice = [1, 1, 1, 2, 1]
    for case in range(3):
        engine.backward(engine(batch(case, engine.rank), choice))
        engine.step()
        losses = [plain(batch(case, rank), choice) for rank in range(engine.world_size)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = engine.full_state_dict(keep=True)
    assert weights is not None
    apart = [float((weights[name] - value).abs().max()) for name, value in plain.state_dict().items()]
    moved = [float((old - new).abs().max()) for old, new in zip(build().parameters(), plain.parameters(), strict=True)]
    return max(apart), max(moved)


@pytest.mark.parametrize("checkpoint", [None, *(pytest.param(way, marks=pytest.mark.slow) for way in (True, False))])
def test_a_block_is_called_on_its_own_output(checkpoint: bool | None) -> None:
    for apart, moved in run_ranks(call_again_and_again, 2, checkpoint):
        assert apart < 1e-12 and moved > 1e-3


def call_other_blocks() -> None:
    engine = start(3, RELEASES)
    x = batch(0, engine.rank)
    for index in (0, 1 + engine.rank, 3):
        x = engine.module.blocks[index](x)


def test_the_error_names_what_each_rank_used() -> None:
    for failure in run_ranks(call_other_blocks, 2, expect_error=True):
        assert isinstance(failure, RankFailure) and isinstance(failure.exception, DivergenceError), failure
        text = failure.message
        assert "rank 0: all_gather blocks.1/float64" in text and "rank 1: all_gather blocks.2/float64" in text
        assert "All of them had come to: all_gather blocks.0/float64" in text
        assert "same layers in the same order" in text and "stages 0-2" in text


def step_on_one_rank() -> None:
    engine = start(2, {})
    engine.backward(engine(batch(0, engine.rank), [0]))
    if engine.rank == 0:
        engine.step()
    else:
        engine.comm.all_gather_object(1, "something else")


def test_other_calls_of_the_engine() -> None:
    for failure in run_ranks(step_on_one_rank, 2, expect_error=True, timeout=30):
        assert failure.kind == "DivergenceError"
        assert "vote step" in failure.message and "objects something else" in failure.message
        assert "same functions of the engine" in failure.message


# ---------------------------------------------------------------- other backends match by order alone
def on_another_backend_start() -> ZeroEngine:
    """Run on gloo under another name: the engine calls what it would call on NCCL, where a tag does not exist."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("by_order", create, devices=["cpu"])
    comm_module.backend_for = lambda device: "by_order"  # type: ignore[attr-defined]
    engine = start(3, RELEASES)
    assert engine.comm.backend == "by_order"
    return engine


def on_another_backend(other_blocks: bool) -> tuple[float, dict[str, Any]]:
    engine = on_another_backend_start()
    choice = [0, 1 + engine.rank * other_blocks, 3]
    for case in range(2):
        loss = engine(batch(case, engine.rank), choice)
        engine.backward(loss)
        engine.step()
    weights = engine.full_state_dict(keep=True)
    assert weights is not None
    return loss.item(), weights


@pytest.mark.parametrize("other_blocks", [False, True])
def test_a_backend_without_tags_trains_alike(other_blocks: bool) -> None:
    results = run_ranks(on_another_backend, 2, other_blocks)
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for case in range(2):
        losses = [plain(batch(case, rank), [0, 1 + rank * other_blocks, 3]) for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, (loss, weights) in enumerate(results):
        assert loss == pytest.approx(losses[rank].item(), rel=1e-12)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value)


def call_other_blocks_on_another_backend() -> None:
    """The gathers of different blocks have one size: the ranks get each other's weights, and an error after that."""
    engine = on_another_backend_start()
    engine.module.blocks[1 + engine.rank](batch(0, engine.rank))
    engine(batch(0, engine.rank), [0])
    raise AssertionError("a loss came out")


def test_without_tags_no_loss_leaves_a_forward_with_other_weights() -> None:
    for failure in run_ranks(call_other_blocks_on_another_backend, 2, expect_error=True):
        assert failure.kind == "DivergenceError", failure
        assert "blocks.1" in failure.message and "blocks.2" in failure.message
        assert "end_forward" in failure.traceback or "before_use" in failure.traceback


# ---------------------------------------------------------------- numbers of the optimizer
def rates_that_differ(stage: int) -> None:
    engine = start(stage, {})
    assert engine.optimizer is not None
    weights = copy.deepcopy(engine.full_state_dict(keep=True))
    engine.optimizer.param_groups[0]["lr"] = 0.01 * (1 + engine.rank)
    engine.backward(engine(batch(0, engine.rank), [0]))
    try:
        engine.step()
    finally:
        assert weights is not None
        for name, value in (engine.full_state_dict(keep=True) or {}).items():
            assert torch.equal(value, weights[name])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_learning_rates_that_differ_by_rank(stage: int) -> None:
    for failure in run_ranks(rates_that_differ, 2, stage, expect_error=True):
        assert isinstance(failure.exception, StateError), failure
        assert "param group 0, lr: 0.01, 0.02" in failure.message


# ---------------------------------------------------------------- the log by itself
def test_a_history_has_one_tag() -> None:
    logs = [OperationLog() for _ in range(3)]
    for what in ("a", "b"):
        for log in logs[:2]:
            log.add("all_gather", what, 8, "float32")
    for what in ("b", "a"):
        logs[2].add("all_gather", what, 8, "float32")
    assert logs[0].tag == logs[1].tag and logs[0].digest == logs[1].digest
    assert logs[0].tag != logs[2].tag and logs[0].digest != logs[2].digest
    assert all(0 <= log.tag < 2**31 and log.digest == int(log.digest) < 2**53 for log in logs)


def test_where_histories_part() -> None:
    same = {3: "all_gather a", 4: "all_gather b"}
    assert difference_of({0: same, 1: {4: "all_gather b", 5: "all_gather c"}}) is None
    assert difference_of({0: same, 1: {9: "all_gather z"}}) is None  # nothing in common
    error = difference_of({0: {**same, 5: "all_gather c"}, 4: {**same, 5: "vote step"}, 7: same})
    text = str(error)
    assert isinstance(error, DivergenceError) and "rank 0: all_gather c" in text and "rank 4: vote step" in text
    assert "rank 7: none of these yet" in text
    called, voted, gathered = ({**same, 5: line} for line in ("call update", "vote step", "all_gather c"))
    called[6] = "vote step"
    assert isinstance(difference_of({0: called, 1: voted}), StateError)
    assert isinstance(difference_of({0: called, 1: gathered}), DivergenceError)
    assert isinstance(difference_of({0: called, 1: voted, 2: gathered}), DivergenceError)


class CountingStore:
    """torch's store in memory, and the bytes that were read."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.read = 0

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self._store.get(key) for key in keys]
        self.read += sum(map(len, values))
        return values


def test_ranks_in_step_read_no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMEOUTS, "stalled", 0.0)
    store, logs = CountingStore(), [OperationLog() for _ in range(64)]
    checks = [OperationCheck(log, lambda: store, "test", rank, len(logs)) for rank, log in enumerate(logs)]
    for log in logs:
        for number in range(300):
            log.add("all_gather", f"layer {number}", 8, "float32")
    for _ in range(2):
        assert not [error for check in checks if (error := check.difference_now())]
    assert 0 < store.read < 2 * 64 * 64 * 40
    logs[5].add("all_gather", "an expert", 8, "float32")  # and all others are behind it: nothing is wrong yet
    assert checks[5].difference_now() is None and checks[6].difference_now() is None
    logs[40].add("all_gather", "the head", 8, "float32")
    logs[40].add("vote", "step")
    assert checks[6].difference_now() is None
    error = checks[40].difference_now()
    text = str(error)
    assert isinstance(error, DivergenceError) and "rank 5: all_gather an expert" in text
    assert "rank 40: all_gather the head (8 x float32), then vote step" in text and "rank 6" not in text
