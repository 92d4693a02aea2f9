"""8-bit messages across groups and hosts: bounds of the error, equal weights on all ranks, bytes, overflows."""

from __future__ import annotations

import collections
import logging
import math
import unittest.mock
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.distributed import block_quantization
from hf_zero.distributed.block_quantization import dequantize, message_bytes, quantize, sum_messages
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError
from hf_zero.sharding.unit import ShardUnit
from tests.distributed.test_sharding_groups import Net
from tests.harness.native_ways import assert_same_on_all_ways
from tests.harness.ranks import run_ranks

WEIGHTS, GRADIENTS = "zero_quantized_weights", "zero_quantized_gradients"
BOTH = {WEIGHTS: True, GRADIENTS: True}
BOUND = 1 / 254 + 1e-6  # of an element's error, as a part of the largest magnitude in its block


# ---------------------------------------------------------------- blocks
@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(block_quantization, "has_library", lambda: False)


def restored(messages: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.empty(len(messages), numel, dtype=dtype)
    dequantize(messages, rows.unbind())
    return rows


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("at_a_time", [1, 256, 2 * 3 * 256, 1 << 18])
@pytest.mark.parametrize("numel", [8, 255, 256, 257, 1000])
def test_the_error_of_a_block_is_bounded(numel: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many elements torch's operations take at a time, messages are the same, and so are sums."""
    monkeypatch.setattr(block_quantization, "_AT_A_TIME", at_a_time)
    rows = torch.randn(3, numel, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-30], [1.0], [1e30]])
    messages = quantize(rows)
    assert messages.shape == (3, message_bytes(numel))
    back = restored(messages, numel)
    for row, known in zip(rows, back, strict=True):
        for block, of_message in zip(row.split(256), known.split(256), strict=True):
            assert (block - of_message).abs().max() <= BOUND * block.abs().max()
    out = torch.empty(numel)
    sum_messages(out, messages)
    assert torch.equal(out, back[0] + back[1] + back[2])
    monkeypatch.setattr(block_quantization, "_AT_A_TIME", 1 << 30)
    assert torch.equal(messages, quantize(rows)) and torch.equal(back, restored(messages, numel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 1000, (1 << 18) + 12_345])  # the last is enough for four threads
def test_the_library_has_torchs_bits(numel: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and sums are the same at every instruction set and number of threads, for ties and infinities, too."""
    generator = torch.Generator().manual_seed(numel)
    rows = (torch.randn(3, numel, generator=generator) * torch.logspace(-20, 2, numel)).to(dtype)
    rows[1] = (torch.arange(numel) % 255 - 127) * 0.5
    rows[1, ::256] = 127.0  # the scale is 1, and halves lie between two integers
    rows[2, 0] = torch.finfo(dtype).max

    def run() -> list[torch.Tensor]:
        messages, out = quantize(rows), torch.empty(numel, dtype=dtype)
        sum_messages(out, messages)
        back = restored(messages, numel, dtype)
        return [messages, *(of for one in (out, back) for of in (one.isnan(), one.nan_to_num(7.0)))]

    assert_same_on_all_ways(block_quantization, run, monkeypatch)


@pytest.mark.usefixtures("way")
def test_zeros_and_the_largest_numbers_come_back() -> None:
    rows = torch.stack([torch.zeros(300), torch.full((300,), 3e38), torch.full((300,), 1e-45)])
    back = restored(quantize(rows), 300)
    assert torch.equal(back[0], rows[0]) and torch.allclose(back[1], rows[1]) and back[2].abs().max() <= 1e-38


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("others", [0.0, 1.0])
def test_a_block_with_a_number_that_is_not_finite_has_none_that_is(value: float, others: float) -> None:
    rows = torch.full((1, 600), others)
    rows[0, 300] = value
    back = restored(quantize(rows), 600)
    assert not back[0, 256:512].isfinite().any()
    assert torch.allclose(back[0, :256], rows[0, :256]) and torch.allclose(back[0, 512:], rows[0, 512:])


def test_the_library_reads_nothing_beyond_a_message() -> None:
    messages = quantize(torch.ones(2, 300))
    with pytest.raises(AssertionError, match="308 bytes about 301 values"):
        sum_messages(torch.empty(301), messages)
    with pytest.raises(AssertionError, match="contiguous"):
        sum_messages(torch.empty(300, 2)[:, 0], messages)
    with pytest.raises(AssertionError, match="contiguous"):
        quantize(torch.ones(300, 2).t())


# ---------------------------------------------------------------- engines on two pretended hosts
def on_hosts(count: int, work: Callable[..., Any], *args: Any) -> Any:
    """Run `work` on ranks of which equal parts take themselves for hosts."""
    size = dist.get_world_size() // count
    with unittest.mock.patch("hf_zero.distributed.comm.host_name", lambda: str(dist.get_rank() // size)):
        return work(*args)


class RootedNet(Net):
    """The root unit has a parameter, too, which stays unsharded from forward to backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(13, 13) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.first)


def _start(zero: dict[str, Any], **config: Any) -> ZeroEngine:
    torch.manual_seed(0)
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
        "desync_timeout": 20,
        **config,
    }
    return hf_zero.initialize(model=RootedNet(), config=whole)[0]


def _backward(engine: ZeroEngine, number: int, factor: float = 1.0) -> float:
    x = torch.randn(2, 13, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    loss = engine(x).float().square().mean() * factor
    engine.backward(loss)
    return loss.item()


def _step(engine: ZeroEngine, number: int, factor: float = 1.0) -> float:
    loss = _backward(engine, number, factor)
    engine.step()
    return loss


def _gradients(zero: dict[str, Any], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the update of a step, which is the mean gradient."""
    engine = _start(zero, **config)
    before = engine.full_state_dict(keep=True)
    _step(engine, 0)
    return {name: before[name] - value for name, value in engine.full_state_dict(keep=True).items()}


@pytest.mark.parametrize(
    ("hosts", "stage", "size", "wire"),
    [
        (2, 1, "all", "fp32"),
        (4, 2, "all", "fp32"),
        (2, 3, "all", "bf16"),
        (1, 2, 2, "bf16"),
        (1, 3, 2, "fp32"),
        (2, 2, 1, "fp32"),
    ],
)
def test_updates_are_within_the_bound(hosts: int, stage: int, size: int | str, wire: str) -> None:
    zero, config = {"stage": stage, "sharding_group": size}, {"communication_data_type": wire}
    want = run_ranks(on_hosts, 4, hosts, _gradients, zero, config)[0]
    for got in run_ranks(on_hosts, 4, hosts, _gradients, {**zero, GRADIENTS: True}, config):
        # The sums of two or four groups, each with half a step of its own block; all ranks' sum is 4 x the mean.
        largest = max(value.abs().max().item() for value in want.values())
        differences = [(got[name] - want[name]).abs().max().item() for name in want]
        assert 0 < max(differences) < 4 * BOUND * largest * (4 if wire == "bf16" else 1)


def _gathered(zero: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[tuple[str, bool, torch.Tensor]]]:
    """Return the weights after a step, and what each unit's gathers give from then on: (unit, is exact, a weight)."""
    engine = _start(zero)
    _step(engine, 0)  # the next gathers are the first ones of changed shards
    before = engine.full_state_dict(keep=True)
    seen = []
    original = ShardUnit.wait_for_unshard

    def wait(unit: ShardUnit) -> None:
        original(unit)
        weight = next(param for flat in unit.flats for param in flat.params if param.dim() == 2)
        seen.append((unit.name, unit.is_exact, weight.detach().clone()))

    with unittest.mock.patch.object(ShardUnit, "wait_for_unshard", wait):
        loss = engine(torch.randn(2, 13)).square().mean()
        between = engine.full_state_dict(keep=True)
        one = hf_zero.full_param(engine.module, "layers.1.weight")
        engine.backward(loss)
    for name, value in {**between, "layers.1.weight": one}.items():
        assert torch.equal(value, before[name])
    return before, seen


@pytest.mark.parametrize(("hosts", "size"), [(2, "all"), (4, "all"), (1, 2), (2, 1)])
def test_all_ranks_compute_with_the_same_weights_and_read_exact_ones(hosts: int, size: int | str) -> None:
    ranks = run_ranks(on_hosts, 4, hosts, _gathered, {"stage": 3, "sharding_group": size, **BOTH})
    before, first = ranks[0]
    largest = max(value.abs().max().item() for value in before.values())  # a block may cut several parameters
    rounded = {name: weight for name, is_exact, weight in first if not is_exact}
    assert len(rounded) == 5
    for _, seen in ranks:
        # Backward computes with the layers of forward, whatever was read between the two.
        assert [(name, is_exact) for name, is_exact, _ in seen] == [(name, is_exact) for name, is_exact, _ in first]
        assert sum(not is_exact for _, is_exact, _ in seen) == 9  # the root unit once
        for name, is_exact, weight in seen:
            exact = before["first" if name == "root" else f"{name}.weight"]
            assert torch.equal(weight, exact if is_exact else rounded[name])
            assert is_exact or 0 < (weight - exact).abs().max() <= BOUND * largest


def _losses(zero: dict[str, Any]) -> list[float]:
    engine = _start(zero, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    return [_step(engine, number) for number in range(5)]


@pytest.mark.parametrize(("stage", "size"), [(2, "all"), (3, 2)])
def test_off_changes_no_bit(stage: int, size: int | str) -> None:
    zero = {"stage": stage, "sharding_group": size}
    off = {WEIGHTS: False, GRADIENTS: False}
    want = run_ranks(on_hosts, 4, 2, _losses, zero)
    assert run_ranks(on_hosts, 4, 2, _losses, {**zero, **off}) == want
    on = run_ranks(on_hosts, 4, 2, _losses, {**zero, GRADIENTS: True, **({WEIGHTS: True} if stage == 3 else {})})
    assert on != want and on == [pytest.approx(losses, rel=0.02, abs=2e-4) for losses in want]


def _sent(zero: dict[str, Any]) -> int:
    """Return the bytes that leave this rank's host in a step, without votes and objects."""
    engine = _start(zero)
    sent: collections.Counter[bool] = collections.Counter()
    original, own = dist.isend, dist.get_rank() // 2

    def isend(tensor: torch.Tensor, **call: Any) -> Any:
        if call["tag"]:
            sent[call["group_dst"] // 2 != own] += 0 if tensor.dtype == torch.float64 else tensor.nbytes
        return original(tensor, **call)

    _step(engine, 0)
    with unittest.mock.patch.object(dist, "isend", isend):
        _step(engine, 1)
    return sent[True]


@pytest.mark.parametrize("size", ["all", 2, 1])
def test_what_leaves_a_host_is_at_most_three_tenths(size: int | str) -> None:
    exact = run_ranks(on_hosts, 4, 2, _sent, {"stage": 3, "sharding_group": size})
    for quantized, whole in zip(
        run_ranks(on_hosts, 4, 2, _sent, {"stage": 3, "sharding_group": size, **BOTH}), exact, strict=True
    ):
        assert 0.25 * whole < quantized <= 0.3 * whole


def _overflow(zero: dict[str, Any]) -> tuple[list[bool], int]:
    engine = _start(zero, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    finite = []
    for number in range(4):
        _step(engine, number, float("inf") if number == 1 and dist.get_rank() == 1 else 1.0)
        finite.append(all(value.isfinite().all() for value in engine.full_state_dict(keep=True).values()))
    return finite, engine.skipped_steps


@pytest.mark.parametrize("stage", [2, 3])
def test_an_overflow_on_one_rank_is_seen_on_all(stage: int) -> None:
    zero = {"stage": stage, GRADIENTS: True, **({WEIGHTS: True} if stage == 3 else {})}
    assert run_ranks(on_hosts, 4, 2, _overflow, zero) == [([True] * 4, 1)] * 4


# ---------------------------------------------------------------- keys in vain
def _warnings(zero: dict[str, Any]) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero.runtime.build").addHandler(handler)
    _step(_start(zero), 0)
    return heard


def test_one_line_where_no_message_leaves_a_host() -> None:
    first, second = run_ranks(_warnings, 2, {"stage": 3, **BOTH})
    assert len(first) == 1 and WEIGHTS in first[0] and GRADIENTS in first[0] and "no effect" in first[0]
    assert second == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 2, WEIGHTS: True}}, f"{WEIGHTS} = true: the stage is 2"),
        ({"zero_optimization": {"stage": 0, GRADIENTS: True}}, f"{GRADIENTS} = true: the stage is 0"),
        ({"zero_optimization": {"stage": 2, GRADIENTS: True, "reduce_scatter": False}}, "reduce_scatter"),
        ({"zero_optimization": {"stage": 3, WEIGHTS: True}, "msamp": {"enabled": True, "opt_level": "O2"}}, "msamp"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "nontrainable"),
    ],
)
def test_keys_that_contradict(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ZeroConfig.load({"train_micro_batch_size_per_gpu": 1, **config}).resolve(world_size=4)
