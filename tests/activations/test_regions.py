"""Checkpointed regions whose inputs lie elsewhere: gradients in fp64, whatever a region takes; and their memory."""

from __future__ import annotations

import logging
import re
import runpy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hf_zero import checkpointing
from hf_zero.errors import ConfigError, StateError
from hf_zero.extras.activations import active, regions
from hf_zero.extras.deepspeed import checkpointing as configuration
from tests.harness.ranks import run_ranks

SIZE = 6
Checkpoint = Callable[..., Any]


@pytest.fixture
def arena() -> Iterator[active.Checkpointing]:
    """Saved inputs are copied, on the CPU too: into memory for five regions."""
    with Configured(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=5) as now:
        yield now


class Configured:
    """hf_zero.checkpointing.configure inside of a block."""

    def __init__(self, mpu: Any = None, **keys: Any) -> None:
        self._arguments = (mpu, keys)

    def __enter__(self) -> active.Checkpointing:
        checkpointing.configure(self._arguments[0], **self._arguments[1])
        now = active.current()
        assert now is not None
        return now

    def __exit__(self, *_: object) -> None:
        assert configuration._end is not None
        configuration._end()
        active.share_inputs(None)
        assert not checkpointing.is_configured()


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=True)


def non_reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False)


WAYS: dict[str, Checkpoint] = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "checkpoint": checkpointing.checkpoint,
    "non_reentrant_checkpoint": checkpointing.non_reentrant_checkpoint,
}
# These give tensors in containers their gradients, as torch's own reentrant one does not.
FLATTEN = ("checkpoint", "non_reentrant_checkpoint")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, dtype=torch.float64)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, factor: float = 1.0) -> torch.Tensor:
        inner = self.linear(x) if y is None else self.linear(x) * torch.sigmoid(y)
        return torch.tanh(nn.functional.dropout(inner, 0.3)) * factor


def several_inputs(way: Checkpoint, a: Block, b: Block, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One is transposed, one a part of a larger tensor, and one of integers."""
    picked = torch.tensor([1, 0, 2])
    mixed = way(lambda one, two, rows: a(one, two)[rows], x.t().contiguous().t(), (2 * y)[:, :SIZE], picked)
    return way(b, mixed, y[:3, :SIZE] * 3)


def no_tensors(way: Checkpoint, a: Block, b: Block, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return way(b, way(a, 2 * x, None, 0.5), None, 3.0)


def used_twice(way: Checkpoint, a: Block, b: Block, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    twice = x * x
    return way(a, twice, twice) + way(b, twice, twice + x)


def nested(way: Checkpoint, a: Block, b: Block, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return way(lambda one: b(way(a, way(b, one * 2) + one)), x * 3)


def several_outputs(way: Checkpoint, a: Block, b: Block, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = way(lambda one: (a(one), b(one)), x * 2)
    return way(a, second) * first


def containers(way: Checkpoint, a: Block, b: Block, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def run(pair: Any, named: Any) -> torch.Tensor:
        return a(pair[0], pair[1][0]) * named["b"] if isinstance(named["text"], str) else x

    return way(run, (x * 2, [x + 1, 7]), {"b": b(x), "text": "no tensor"})


PROGRAMS = [several_inputs, no_tensors, used_twice, nested, several_outputs, containers]


def gradients(program: Callable[..., torch.Tensor], way: Checkpoint) -> list[torch.Tensor]:
    """Return the gradients of inputs and parameters, with dropout; and twice from one graph."""
    torch.manual_seed(0)
    a, b = Block(), Block()
    x = torch.randn(4, SIZE, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, SIZE + 2, dtype=torch.float64, requires_grad=True)
    loss = program(way, a, b, x, y).square().sum()
    random = torch.rand(1)
    loss.backward(retain_graph=True)
    loss.backward()
    grads = [one.grad for one in (x, y, *a.parameters(), *b.parameters()) if one.grad is not None]
    return [loss.detach(), random.double(), *grads]


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_without_checkpoints(name: str, arena: active.Checkpointing) -> None:
    for program in PROGRAMS:
        if program is containers and name not in FLATTEN:
            continue
        expected, before = gradients(program, plainly), arena.saved.usage()["device_peak"]
        found = gradients(program, WAYS[name])
        assert len(found) == len(expected) > 5, program
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=lambda text: f"{program}: {text}")  # noqa: B023
        assert arena.saved.usage()["device_peak"] >= before > 0 or program is PROGRAMS[0], (
            "vacuous: nothing was copied"
        )
    assert arena.saved.usage()["device"] == 0 and arena.saved.num_live == 0


def test_a_number_that_is_too_small_is_named() -> None:
    a, x = Block(), torch.randn(4, SIZE, dtype=torch.float64, requires_grad=True)
    keys = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2}
    with Configured(**keys) as now:
        for way in (reentrant, non_reentrant):
            outputs = [way(a, x * number) for number in range(2)]
            with pytest.raises(ConfigError, match="number_checkpoints = 2 is too small"):
                way(a, x * 3)
            sum(outputs).sum().backward()  # type: ignore[union-attr]
            del outputs
        allocations = now.saved.usage()["allocations"]
        non_reentrant(a, x * 2).sum().backward()
        assert now.saved.usage()["allocations"] == allocations == 1, "an arena is allocated once"


def test_names_are_those_of_deepspeeds_long_path_too() -> None:
    from hf_zero.runtime.activation_checkpointing import checkpointing as other

    assert other.__all__ == checkpointing.__all__
    assert all(getattr(other, name) is getattr(checkpointing, name) for name in checkpointing.__all__)


def test_mistakes_of_configure_are_named() -> None:
    for keys, text in (
        ({"contiguous_checkpointing": True, "num_checkpoints": 2}, "goes with partition_activations only"),
        ({"contiguous_checkpointing": True, "partition_activations": True}, "it needs number_checkpoints"),
        ({"num_checkpoints": 0}, "an integer of at least 1"),
        ({"mpu_": object()}, "names no group"),
    ):
        with pytest.raises(ConfigError, match=text):
            checkpointing.configure(**keys)  # type: ignore[arg-type]
    assert not checkpointing.is_configured()
    assert torch.utils.checkpoint.CheckpointFunction is regions._torch_reentrant


def test_named_random_states_are_those_of_the_forward() -> None:
    def run(way: Checkpoint) -> torch.Tensor:
        checkpointing.model_parallel_cuda_manual_seed(7)
        tracker = checkpointing.get_cuda_rng_tracker()
        torch.manual_seed(1)
        x = torch.ones(50, requires_grad=True)

        def noisy(x: torch.Tensor) -> torch.Tensor:
            with tracker.fork():
                return nn.functional.dropout(x, 0.5) * x

        (way(noisy, x) + way(noisy, x)).sum().backward()
        tracker.reset()
        assert x.grad is not None
        return x.grad

    expected = run(plainly)
    for name in FLATTEN:
        assert torch.equal(run(WAYS[name]), expected), name
    with pytest.raises(StateError, match="no state named"), checkpointing.get_cuda_rng_tracker().fork():
        pass


def partitioned(shared: bool) -> Any:
    """A rank of a group of two with the same inputs, or with others on rank 1."""
    rank = torch.distributed.get_rank()
    results = []
    for way in (plainly, reentrant, non_reentrant):
        keys = {"partition_activations": True, "contiguous_checkpointing": way is reentrant, "num_checkpoints": 2}
        with Configured(torch.distributed.group.WORLD, **keys) as now:
            torch.manual_seed(0)
            a, b, x = Block(), Block(), torch.randn(4, SIZE, dtype=torch.float64, requires_grad=True)
            hidden = way(a, x * (1 if shared else 1 + rank))
            loss = way(b, hidden[:3]).square().sum()
            del hidden
            live = now.saved.usage()["device"]
            loss.backward()
            results.append((live, [one.grad for one in (x, *a.parameters(), *b.parameters())]))
    return results


def test_a_group_keeps_a_part_each() -> None:
    for results in run_ranks(partitioned, 2, True):
        (_, expected), (arena_bytes, first), (live, second) = results
        assert live == 8 * (4 * SIZE + 3 * SIZE) // 2 and live <= arena_bytes <= 2 * 512
        for found in (first, second):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_group_whose_inputs_differ_is_detected() -> None:
    for failure in run_ranks(partitioned, 2, False, expect_error=True):
        assert failure.kind == "DivergenceError" and "the inputs differ" in failure.message, failure
        assert f"rank {failure.rank}: " in failure.message


def as_deepspeed_does() -> Any:
    """The results of megatron_script.py, and what it leaves behind."""
    try:
        results = runpy.run_path(str(Path(__file__).with_name("megatron_script.py")))["results"]
        now = active.current()
        assert now is not None
        return results, now.settings, now.saved.usage()["device_peak"]
    finally:
        assert configuration._end is not None
        configuration._end()
        active.share_inputs(None)


def test_a_script_with_deepspeeds_names_gives_what_deepspeed_gives() -> None:
    """The losses are those of DeepSpeed 0.19.8, of the same script with `import deepspeed`."""
    for results, settings, peak in run_ranks(as_deepspeed_does, 2):
        for losses, grads in results.values():
            torch.testing.assert_close(losses, [1.8279138346803416, 1.015233097884128], rtol=1e-12, atol=0)
            assert all(torch.equal(one, other) for one, other in zip(grads, results["plain"][1], strict=True))
        assert settings.number_checkpoints == 3 and settings.partition_activations is True
        assert peak == 3 * 4 * 8 * 8 // 2, "each rank keeps half of the inputs of three layers of 4 x 8 in fp64"


def test_profile_logs_the_time_of_every_border(caplog: pytest.LogCaptureFixture) -> None:
    """A forward and a recomputation each, in their order; the sleep in a region is in its times."""
    a, x = Block(), torch.randn(4, SIZE, dtype=torch.float64, requires_grad=True)

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return a(x)

    with caplog.at_level(logging.INFO), Configured(profile=True):
        for way in (reentrant, non_reentrant):
            way(a, way(slow, x * 2)).sum().backward()
    found = re.findall(r"activation_checkpointing: region (\d), (\w+): ([\d.]+) ms", caplog.text)
    order = [("0", "forward"), ("1", "forward"), ("1", "recomputation"), ("0", "recomputation")]
    assert [line[:2] for line in found] == order * 2, caplog.text
    assert [float(ms) >= 20 for _, _, ms in found] == [True, False, False, True] * 2, caplog.text
