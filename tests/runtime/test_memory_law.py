"""Bytes per rank between steps follow each stage's law, in `engine.memory_report()` and in a walk of live tensors.

P parameters, N ranks, Adam; bytes of parameters, gradients, master weights and moments:

| stage | 16-bit model, 16-bit gradients | 16-bit model, fp32 gradients (default) | fp32 model |
|---|---|---|---|
| 0 | 16 P | 18 P | 16 P |
| 1 | 4 P + 12 P/N | 6 P + 12 P/N | 8 P + 8 P/N |
| 2 | 2 P + 14 P/N | 2 P + 16 P/N | 4 P + 12 P/N |
| 3 | 16 P/N | 18 P/N | 16 P/N |

An fp32 parameter is its own master.
"""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from tests.harness.memory import anonymous_bytes
from tests.harness.ranks import run_ranks

WIDTH, INNER, VOCAB, NUM_LAYERS = 61, 131, 67, 6
STEPS = 2

BF16 = {"bf16": {"enabled": True}}
BF16_GRADS = {**BF16, "data_types": {"grad_accum_dtype": "bf16"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Wide enough that padding and the optimizer's step counters stay far below the tolerance of the law."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(input_ids))).float().square().mean()


@dataclasses.dataclass
class Measured:
    num_params: int  # P
    report: dict[str, int]
    walked: int  # bytes of live tensors, less what is kept for reuse
    reserve: int  # bytes kept for reuse: receive buffers and whole-gradient buffers
    layer_bytes: int  # one gathered layer
    root_bytes: int
    seen_peak: int  # most gathered bytes seen at the borders of layers, forward and backward


def measure(jobs: list[tuple[int, dict[str, Any]]]) -> list[Measured]:
    return [_measure_one(stage, config) for stage, config in jobs]


def _measure_one(stage: int, config: dict[str, Any]) -> Measured:
    gc.collect()
    gc.freeze()  # what exists already is no longer walked
    model = Stack()
    num_params = sum(param.numel() for param in model.parameters())
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1}
    engine = hf_zero.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **config},
    )[0]
    seen = _watch_gathered(engine)
    for _ in range(STEPS):
        engine.backward(engine(torch.arange(14).view(2, 7)))
        engine.step()
    gc.collect()
    reserve = _reserve(engine)
    kept = {tensor.untyped_storage().data_ptr() for tensor in reserve}
    live = {ptr: n for ptr, n in _live_storages().items() if ptr not in kept}
    sizes = {unit.name: unit.full_bytes for unit in engine.units}
    return Measured(
        num_params,
        engine.memory_report(),
        sum(live.values()),
        sum(tensor.untyped_storage().nbytes() for tensor in reserve),
        max(n for name, n in sizes.items() if name != "root"),
        sizes["root"],
        max(seen, default=0),
    )


def _live_storages() -> dict[int, int]:
    """Address -> bytes of the memory behind every tensor that Python can reach."""
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
    return storages


def _reserve(engine: ZeroEngine) -> list[torch.Tensor]:
    return [*engine.comm._received.blocks, *(one.memory for one in engine.pool.free)]


def _watch_gathered(engine: ZeroEngine) -> list[int]:
    """Return the bytes of unsharded parameters of on-demand units, noted at every border of a layer in forward and
    backward.
    """
    seen: list[int] = []

    def note(*_: Any) -> None:
        full = [buffer.full for unit in engine.units if unit.on_demand for buffer in unit.flats]
        seen.append(sum(tensor.untyped_storage().nbytes() for tensor in full))

    for module in engine.module.modules():
        if isinstance(module, Block):
            module.register_forward_hook(note)
            module.register_full_backward_hook(note)
    return seen


def law(stage: int, world: int, dtype: str) -> float:
    """Return the bytes per parameter."""
    n = world
    table = {
        "bf16, bf16 gradients": [16, 4 + 12 / n, 2 + 14 / n, 16 / n],
        "bf16": [18, 6 + 12 / n, 2 + 16 / n, 18 / n],
        "fp32": [16, 8 + 8 / n, 4 + 12 / n, 16 / n],
    }
    return table[dtype][stage]


CONFIGS = {"bf16, bf16 gradients": BF16_GRADS, "bf16": BF16, "fp32": {}}


@pytest.mark.parametrize(
    "world",
    [
        2,
        *(
            pytest.param(world, marks=pytest.mark.slow)
            for world in (
                1,
                3,
            )
        ),
    ],
)
def test_memory_between_steps(world: int) -> None:
    jobs = [(stage, name) for name in CONFIGS for stage in range(4)]
    by_rank = run_ranks(measure, world, [(stage, CONFIGS[name]) for stage, name in jobs])
    for rank, results in enumerate(by_rank):
        for (stage, name), got in zip(jobs, results, strict=True):
            label = f"stage {stage}, {name}, rank {rank} of {world}: {got}"
            want = law(stage, world, name) * got.num_params
            assert got.report["total"] == pytest.approx(want, rel=0.03), label
            # Tensors that are nobody's parameter, gradient or state: placeholders, step counters, offsets.
            assert got.walked == pytest.approx(got.report["total"], rel=0.03), label
            parts = [got.report[kind] for kind in ("parameters", "gradients", "master", "optimizer")]
            assert sum(parts) == got.report["total"], label
            assert (got.report["master"] > 0) == (name != "fp32"), label


@pytest.mark.parametrize("world", [2, 3])
def test_peak_inside_backward(world: int) -> None:
    """The root, the layer in use and the next one are unsharded at stage 3, not the model."""
    for results in run_ranks(measure, world, [(3, BF16), (3, {})]):
        for got in results:
            peak = got.report["gathered_peak"]
            assert got.root_bytes + got.layer_bytes <= got.seen_peak <= peak
            assert peak <= got.root_bytes + 3 * got.layer_bytes
            assert peak < got.root_bytes + NUM_LAYERS * got.layer_bytes
            assert got.report["gradients_peak"] > 0
            # Two reduces in flight and one buffer that is filling, in fp32, beside the root's.
            fp32 = 4 * (got.root_bytes + 3 * got.layer_bytes) / 2
            assert got.report["gradients_peak"] <= fp32
            assert got.reserve <= 4 * fp32


def growth_of_a_start() -> tuple[int, int]:
    """Return (bytes by which the process has grown since before the model was made, bytes that the engine reports)."""
    before = anonymous_bytes()
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(64)))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": {"stage": 3}})[0]
    return anonymous_bytes() - before, engine.memory_report()["total"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory of a process is read from Linux's /proc")
def test_the_whole_parameters_are_back_with_the_system() -> None:
    """The C library keeps freed memory: of 268 MB of parameters a rank has half when it begins to train."""
    for growth, held in run_ranks(growth_of_a_start, 2):
        assert 250e6 < held < 290e6
        assert growth < held + 30e6
