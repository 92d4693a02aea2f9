"""Shards in host memory, which copies to the device may still be reading: whoever writes there waits for these first.

Each case writes right after a forward that nobody has waited for, on the lag device, which reports a write that came
too early. The numbers are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
import hf_zero.errors
from hf_zero.engine import recovery
from hf_zero.engine.engine import ZeroEngine
from tests.harness.ranks import run_ranks
from tests.lag import device, group
from tests.lag.test_training import VOCABULARY, Layers

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

_ON_HOST = {"device": "cpu", "pin_memory": True}
# Writers to the shard of parameters: torch, which has it as masters; native code; or the device.
UPDATES = {
    "by torch": {"offload_optimizer": _ON_HOST},
    "native": {"offload_optimizer": _ON_HOST},
    "delayed": {"offload_optimizer": {**_ON_HOST, "delayed_update": True}},
    "on the device": {},
}

Write = Callable[[ZeroEngine, hf_zero.ShardedEMA, Callable[[], None], str], None]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def average_is_swapped_in(engine: ZeroEngine, ema: hf_zero.ShardedEMA, forward: Callable[[], None], _: str) -> None:
    with ema.swapped():
        forward()


def weights_are_loaded(engine: ZeroEngine, _: hf_zero.ShardedEMA, forward: Callable[[], None], folder: str) -> None:
    state = engine.full_state_dict(keep=True)
    forward()
    engine.load_full_state_dict({name: value * 0.5 for name, value in state.items()})


def checkpoint_is_loaded(engine: ZeroEngine, _: hf_zero.ShardedEMA, forward: Callable[[], None], folder: str) -> None:
    engine.save_checkpoint(folder)
    hf_zero.set_full_param(engine.module, torch.ones(8), "layers.0.norm.weight")
    forward()
    engine.load_checkpoint(folder)


def parameter_is_set(engine: ZeroEngine, _: hf_zero.ShardedEMA, forward: Callable[[], None], __: str) -> None:
    hf_zero.set_full_param(engine.module, torch.full((8, 8), 0.25), "layers.1.mlp.weight")
    forward()
    mine = hf_zero.local_param(engine.module, "layers.2.mlp.weight")
    forward()
    hf_zero.set_local_param(engine.module, None if mine is None else mine.values * 0.5, "layers.2.mlp.weight")


WRITES = [
    average_is_swapped_in,
    weights_are_loaded,
    checkpoint_is_loaded,
    parameter_is_set,
]


def _engine(place: str, update: str) -> ZeroEngine:
    torch.manual_seed(0)
    model = Layers().to(place)
    engine, *_ = hf_zero.initialize(model=model, config=_config(update))
    return engine


def _config(update: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_force_ds_cpu_optimizer": update != "by torch",
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": _ON_HOST,
            **UPDATES[update],
        },
    }


def _run(place: str, update: str, write: Write, folder: str) -> list[float]:
    """Return the losses of forwards around the write, and of steps before and after it."""
    engine = _engine(place, update)
    ema = hf_zero.ShardedEMA(engine.module, decay=0.5)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    ids = torch.randint(VOCABULARY, (2, 5), generator=generator).to(engine.device)
    losses = []

    def forward() -> None:
        with torch.no_grad():
            losses.append(engine(ids, ids.roll(1)))

    def step() -> None:
        loss = engine(ids, ids.roll(1))
        engine.backward(loss)
        engine.step()
        ema.update()
        losses.append(loss.detach())

    step()
    step()
    forward()
    write(engine, ema, forward, folder)
    forward()
    step()
    forward()
    return [loss.item() for loss in losses]


def _on_lag(run: Callable[..., Any], *arguments: Any) -> Any:
    device.enable()
    group.register()
    result = run("lag", *arguments)
    torch.accelerator.synchronize()
    assert device.take_reports() == []
    return result


def _norm_of_nothing(place: str) -> float:
    """A step without gradients, after those of a window were given up on their way to the host."""
    engine = _engine(place, "native")
    ids = torch.ones(2, 5, dtype=torch.long, device=engine.device)
    engine.backward(engine(ids, ids))
    engine.zero_grad()
    engine.step()
    return float(engine.get_global_grad_norm())


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_host_writes_when_the_device_has_read(update: str, write: Write, tmp_path: Path) -> None:
    expected = run_ranks(_run, 2, "cpu", update, write, str(tmp_path / "cpu"))
    assert run_ranks(_on_lag, 2, _run, update, write, str(tmp_path / "lag")) == expected


def test_gradients_that_were_given_up_come_too_late() -> None:
    assert run_ranks(_on_lag, 2, _norm_of_nothing) == run_ranks(_norm_of_nothing, 2, "cpu") == [0.0, 0.0]


def _memory_goes(place: str) -> list[float]:
    """Another engine, which has the parameters on the device, takes the model over right after a forward."""
    engine = _engine(place, "native")
    ids = torch.ones(2, 5, dtype=torch.long, device=engine.device)
    losses = [engine(ids, ids).detach()]
    engine.zero_grad()
    on_device = {**_config("native"), "zero_optimization": {"stage": 3}}
    again, *_ = hf_zero.initialize(model=engine.module, config=on_device)
    losses.append(again(ids, ids).detach())
    return [loss.item() for loss in losses]


def test_memory_goes_when_the_device_has_read() -> None:
    assert run_ranks(_on_lag, 2, _memory_goes) == run_ranks(_memory_goes, 2, "cpu")


def _broken_off(place: str, update: str) -> list[float]:
    """A backward that ends inside a layer, while gradients are reduced and another layer is gathered; then a step."""
    engine = _engine(place, update)
    ids = torch.ones(2, 5, dtype=torch.long, device=engine.device)
    for _ in range(2):  # the order of layers is known then
        engine.backward(engine(ids, ids))
        engine.step()

    def run_out(grad: torch.Tensor) -> None:
        raise hf_zero.errors.OutOfMemoryError("out of memory")

    handle = engine.module.layers[1].mlp.register_forward_hook(lambda _, __, out: out.register_hook(run_out) and None)
    try:
        engine.backward(engine(ids, ids))
    except hf_zero.errors.OutOfMemoryError as error:
        recovery.drop_frames(error)
    handle.remove()
    recovery.recover()
    engine.backward(engine(ids, ids))
    engine.step()
    return [float(engine.get_global_grad_norm()), engine(ids, ids).item()]


@pytest.mark.parametrize("update", ["native", "on the device"])
def test_a_pass_is_broken_off(update: str) -> None:
    assert run_ranks(_on_lag, 2, _broken_off, update) == run_ranks(_broken_off, 2, "cpu", update)
