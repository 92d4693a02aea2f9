"""The keys that say what a step updates and in which pieces."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError, StateError
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case
from tests.harness.sharded import Options, micro_step, start, zero_config


def _slow(*values: Any) -> list[Any]:
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=pytest.mark.slow) for value in tuples]


# ---------------------------------------------------------------- ignore_unused_parameters
STRICT = (("ignore_unused_parameters", False),)


def step_strictly(model: str, stage: int) -> str:
    case, options = Case(model, 2, 2), Options(stage, zero=STRICT)
    engine = start(case, options)
    try:
        for step in range(2):
            for micro in range(case.accumulation):
                micro_step(engine, case, step, micro, options)
    except StateError as error:
        return str(error)
    return f"{engine.global_steps} steps"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_unused_parameters_are_refused_where_asked(stage: int) -> None:
    """`unused` has a layer of 16 parameters without gradient and a gain in each of three; `unused_somewhere` has such
    parameters on rank 1 only."""
    for text in run_ranks(step_strictly, 2, "unused", stage):
        assert text.startswith("19 parameter(s) had no gradient on any rank") and "extra.attention.key.bias" in text
        assert "ignore_unused_parameters" in text
    for model in ("plain", "unused_somewhere"):
        assert run_ranks(step_strictly, 2, model, stage) == ["2 steps"] * 2


# ---------------------------------------------------------------- sub_group_size
class Temporaries(TorchDispatchMode):
    """Elements of what every foreach operation returns: its temporaries."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "_foreach_" in func.__name__ and isinstance(out, list | tuple):
            self.sizes.append(sum(tensor.numel() for tensor in out if isinstance(tensor, torch.Tensor)))
        return out


@dataclasses.dataclass
class Updated:
    calls: list[int]  # per step, of the user's optimizer
    largest: int  # temporary
    tensors: list[int]  # elements of the tensors that the optimizer holds
    weights: dict[str, torch.Tensor]


def update_in_groups(stage: int, sizes: list[int], bf16: bool) -> list[Updated]:
    return [_update_one(stage, size, bf16) for size in sizes]


def _update_one(stage: int, size: int, bf16: bool) -> Updated:
    case = Case("plain", 2, 1, single=True)
    config = (("bf16", {"enabled": True}), ("data_types", {"grad_accum_dtype": "bf16"})) if bf16 else ()
    options = Options(stage, zero=(("sub_group_size", size),), config=config)
    calls: list[int] = []
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=zero_config(case, options))[0]
    with Temporaries() as seen:
        for step in range(3):
            micro_step(engine, case, step, 0, options)
    tensors = [param.numel() for group in optimizer.param_groups for param in group["params"]]
    return Updated(calls, max(seen.sizes), tensors, engine.full_state_dict(keep=True))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bf16"), [(3, True), (0, False), (1, True), (2, False)])
def test_torch_updates_in_groups(stage: int, bf16: bool) -> None:
    """The same bits, in as many calls as groups, none of which is larger than the key says."""
    sizes = [1000, 300, 10**9]
    for results in run_ranks(update_in_groups, 2, stage, sizes, bf16):
        whole = results[-1]
        total, largest = sum(whole.tensors), max(whole.tensors)
        assert len(whole.calls) == 3 and whole.largest == total
        for size, got in zip(sizes[:-1], results[:-1], strict=True):
            groups, rest = divmod(len(got.calls), 3)
            assert rest == 0 and -(-total // size) <= groups <= 2 * -(-total // size)
            assert got.largest <= max(size, largest) < total
            assert all(torch.equal(value, whole.weights[name]) for name, value in got.weights.items())


UNTESTED = {"zero_allow_untested_optimizer": True}


class Counting(torch.optim.SGD):
    """Somebody's optimizer that counts its calls."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        return super().step(closure)


def step_with_unknown(size: int) -> int:
    case, options = Case("plain", 2, 1), Options(1, zero=(("sub_group_size", size),))
    model = case.build()
    optimizer = Counting(model.parameters(), lr=0.1)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={**zero_config(case, options), **UNTESTED})[0]
    for step in range(2):
        micro_step(engine, case, step, 0, options)
    return int(optimizer.param_groups[0]["calls"])


def test_other_optimizers_are_called_once() -> None:
    assert run_ranks(step_with_unknown, 2, 100) == [2, 2]


def update_natively(folder: str, device: str, sizes: list[int]) -> list[tuple[list[tuple[int, int]], Any]]:
    """Return for each size: (elements, tiles) of every master shard, and the weights."""
    results = []
    for size in sizes:
        block = {"device": device, "nvme_path": folder}
        case = Case("plain", 2, 1, single=True)
        options = Options(2, zero=(("sub_group_size", size), ("offload_optimizer", block)))
        engine: ZeroEngine = start(case, options)
        for step in range(3):
            micro_step(engine, case, step, 0, options)
        masters = [buffer.master for unit in engine.units for buffer in unit.flats]
        tiles = [(master.layout.shard_numel, len(master.tiles)) for master in masters]  # type: ignore[union-attr]
        results.append((tiles, engine.full_state_dict(keep=True)))
        engine.teardown()
    return results


@pytest.mark.parametrize("device", ["cpu", *_slow("nvme")])
def test_native_updates_in_tiles(tmp_path: Path, device: str) -> None:
    sizes = [1000, 100, 10**9]
    for results in run_ranks(update_natively, 2, str(tmp_path), device, sizes):
        for size, (tiles, weights) in zip(sizes, results, strict=True):
            assert [count for _, count in tiles] == [-(-numel // size) for numel, _ in tiles]
            assert all(torch.equal(value, results[-1][1][name]) for name, value in weights.items())
        assert max(count for _, count in results[1][0]) > 2


def begin_capturable(stage: int, from_block: bool, offload: bool) -> list[str]:
    model = torch.nn.Linear(3, 2)
    zero: dict[str, Any] = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    config: dict[str, Any] = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    block = {"optimizer": {"type": "RAdam", "params": {"lr": 0.1, "capturable": True}}} if from_block else {}
    given = None if from_block else torch.optim.RAdam(model.parameters(), capturable=True)
    with pytest.raises(ConfigError) as raised:
        hf_zero.initialize(model=model, optimizer=given, config={**config, **block})
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.RAdam(model.parameters()), config=config)[0]
    with pytest.raises(ConfigError, match="capturable"):
        engine.optimizer.add_param_group({"params": [], "capturable": True})
    engine.teardown()
    return [str(raised.value)]


@pytest.mark.parametrize(("stage", "from_block", "offload"), [(0, True, False), (2, False, False), (3, True, True)])
def test_capturable_on_the_cpu_is_refused_when_the_engine_is_made(stage: int, from_block: bool, offload: bool) -> None:
    """torch's own error is an assertion in the first step."""
    for (message,) in run_ranks(begin_capturable, 2, stage, from_block, offload):
        assert "RAdam(capturable=True)" in message and "optimizer.params.capturable" in message, message
        assert "device cpu" in message and "Remove capturable" in message
