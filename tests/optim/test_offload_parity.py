"""Offloading changes no number: every combination gives the run of one process, and cpu and nvme the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.compare import assert_not_vacuous, assert_same_exact, assert_same_single, assert_stays
from tests.harness.ranks import run_ranks
from tests.harness.reference import Case, Trace, train_reference
from tests.harness.sharded import Options, digest, start, train_all

# (stage, offload_optimizer, offload_param)
COMBINATIONS = [
    *itertools.product((1, 2), ("cpu", "nvme"), ("none",)),
    *((3, optimizer, param) for optimizer, param in itertools.product(("none", "cpu", "nvme"), repeat=2)),
]
# Shards whose offsets are no multiple of 512 bytes, and tiles that cut parameters at odd places.
SMALL_TILES = (("sub_group_size", 307), ("reduce_bucket_size", 850))
# The same of convnet, which is fifteen times as large: its largest parameter lies in ten tiles and four buckets.
TILES_OF_CONVNET = (("sub_group_size", 2767), ("reduce_bucket_size", 7649))


def offload(folder: Path, optimizer: str, param: str = "none", **more: Any) -> tuple[tuple[str, Any], ...]:
    """The keys of zero_optimization for a combination; parameters go to disk whatever their number."""
    blocks: list[tuple[str, Any]] = []
    if optimizer != "none":
        blocks.append(("offload_optimizer", {"device": optimizer, "nvme_path": str(folder), **more}))
    if param != "none":
        blocks.append(("offload_param", {"device": param, "nvme_path": str(folder), "max_in_cpu": 0}))
    return tuple(blocks)


def check(runs: list[tuple[Case, Options]]) -> list[Trace]:
    """Train every run on its ranks, in one job, and compare each with its one-process reference."""
    for case in {case for case, _ in runs}:
        assert_not_vacuous(case, train_reference(case))
    by_rank = run_ranks(train_all, runs[0][0].world, runs, timeout=180)
    for (case, options), trace, *others in zip(runs, *by_rank, strict=True):
        label = f"{case}, {options}"
        compare = assert_same_single if case.single else assert_same_exact
        compare(case, train_reference(case), trace, label)
        assert_stays(case, trace, label)
        assert all(other == digest(trace) for other in others), f"{label}: ranks differ"
    return by_rank[0]


def matrix(
    model: str, world: int, folder: Path, *, single: bool = False, accumulations: tuple[int, ...] = (1, 3)
) -> list[tuple[Case, Options]]:
    tiles = TILES_OF_CONVNET if model == "convnet" else SMALL_TILES
    return [
        (
            Case(model, world, accumulation, steps=3, single=single),
            Options(stage, zero=(*offload(folder, optimizer, param), *tiles)),
        )
        for (stage, optimizer, param), accumulation in itertools.product(COMBINATIONS, accumulations)
    ]


@pytest.mark.slow
def test_combinations_follow_one_process(tmp_path: Path) -> None:
    check(matrix("tied+unused_somewhere", 2, tmp_path, accumulations=(3,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "world"),
    [
        ("plain", 2),
        ("frozen", 3),
        *(
            pytest.param(model, world, marks=pytest.mark.nightly)
            for model, world in (("plain", 1), ("twice+reentrant", 2), ("unequal", 2), ("unused", 1), ("convnet", 2))
        ),
    ],
)
def test_matrix_in_double(model: str, world: int, tmp_path: Path) -> None:
    check(matrix(model, world, tmp_path, accumulations=(1, 3) if model == "plain" else (3,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "world"),
    [*(pytest.param(*one, marks=pytest.mark.nightly) for one in (("plain", 2), ("tied", 3))), ("llama", 1)],
)
def test_matrix_in_single(model: str, world: int, tmp_path: Path) -> None:
    """The twin of the fp64 matrix, without accumulation: `test_equal_to_torch_after_twenty_steps`."""
    check(matrix(model, world, tmp_path, single=True, accumulations=(3,)))


@pytest.mark.slow
@pytest.mark.parametrize("clip", [pytest.param(0.1, marks=pytest.mark.nightly), 0.0])
def test_media_give_the_same_bits(clip: float, tmp_path: Path) -> None:
    """The updates on disk run inside backward, for nothing is clipped; sequential I/O and whole-shard tiles are other
    orders.
    """
    case = Case("tied", 2, 3, steps=4, single=True, clip=clip)
    sequential = {"pipeline_read": False, "pipeline_write": False, "fast_init": True}
    variants = [
        offload(tmp_path, "cpu"),
        offload(tmp_path, "cpu", "cpu"),
        offload(tmp_path, "nvme"),
        offload(tmp_path, "nvme", "nvme"),
        (*offload(tmp_path, "nvme", "nvme"), ("sub_group_size", 61)),
        (*offload(tmp_path, "nvme", **sequential), ("overlap_comm", False)),
        (*offload(tmp_path, "nvme", buffer_count=1), ("sub_group_size", 61)),
    ]
    runs = [(case, Options(3, zero=zero)) for zero in variants]
    traces = run_ranks(train_all, 2, runs, timeout=180)[0]
    want = digest(traces[0])
    for (_, options), trace in zip(runs, traces, strict=True):
        assert digest(trace) == want, f"{options}: other bits than {runs[0][1]}"
    assert len(set(traces[0].losses)) == case.steps
    if clip:
        assert all(norm > clip for norm in traces[0].norms)


@pytest.mark.slow
def test_equal_to_torch_after_twenty_steps(tmp_path: Path) -> None:
    """The native Adam beside torch's AdamW on the same shards: 1e-6 of each parameter's size."""
    case = Case("plain", 2, 1, steps=20, single=True, clip=0.0)
    variants = [(), offload(tmp_path, "cpu"), offload(tmp_path, "nvme", "nvme")]
    runs = [(case, Options(stage, zero=zero)) for stage in (2, 3) for zero in variants if stage == 3 or len(zero) < 2]
    traces = run_ranks(train_all, 2, runs, timeout=180)[0]
    for (_, options), trace in zip(runs, traces, strict=True):
        for name, want in traces[0].params[-1].items():
            if name.endswith("key.bias"):
                continue  # no true gradient: Adam makes steps out of the signs of rounding errors
            difference = (trace.params[-1][name] - want).abs().max() / want.abs().max()
            assert difference <= 1e-6, f"{options}: {name} is off by {difference:.3g} of its size"


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_ratio(ratio: float, tmp_path: Path) -> None:
    check([(Case("plain", 2, 1, steps=3), Options(3, zero=offload(tmp_path, "cpu", ratio=ratio)))])


def memory_of_ratio(ratio: float) -> tuple[int, int]:
    """Return (bytes of states on the host, of all states)."""
    case = Case("plain", 2)
    zero = (("offload_optimizer", {"device": "cpu", "ratio": ratio}), ("stage3_param_persistence_threshold", 0))
    report = start(case, Options(3, zero=zero)).memory_report()
    return report["host"], report["master"] + report["optimizer"]


def test_ratio_says_how_much_leaves_the_device() -> None:
    shares = {}
    for ratio in (0.0, 0.5, 1.0):
        host, states = run_ranks(memory_of_ratio, 2, ratio, timeout=60)[0]
        shares[ratio] = host / states if states else 0.0
    assert shares[0.0] == 0.0 and shares[1.0] == 1.0
    assert shares[0.5] >= 0.4


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_torch_optimizer_on_the_host(optimizer: str, tmp_path: Path) -> None:
    """zero_force_ds_cpu_optimizer: false: torch's own optimizer, its state in host memory."""
    config = (("zero_force_ds_cpu_optimizer", False),)
    check(
        [
            (Case("plain", 2, 1, optimizer, steps=3), Options(stage, zero=offload(tmp_path, "cpu"), config=config))
            for stage in (1, 2, 3)
        ]
    )


def train_bf16(zero: tuple[tuple[str, Any], ...]) -> tuple[list[float], int]:
    """Return the losses of a bf16 run, and how many 16-bit shards were checked against their masters, to the bit."""
    case = Case("plain", 2, 1, steps=5, single=True, clip=0.0)
    engine = start(case, Options(3, zero=zero, config=(("bf16", {"enabled": True}),)))
    losses = []
    for step in range(case.steps):
        loss = engine(**case.batch(step, 0, engine.rank))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.finish_updates()
    checked = 0
    for buffer in (buffer for unit in engine.units for buffer in unit.flats):
        if buffer.dtype == torch.bfloat16:
            for run in buffer.layout.slices(buffer.rank):
                assert torch.equal(buffer.shard.read_slice(run), buffer.master.read_slice(run).to(torch.bfloat16)), (
                    run.name
                )
                checked += 1
    return losses, checked


@pytest.mark.slow
def test_bf16_copies_are_rounded_masters(tmp_path: Path) -> None:
    """The native update writes the 16-bit parameter in the same pass, rounded as torch rounds."""
    want, checked = run_ranks(train_bf16, 2, (), timeout=60)[0]
    assert checked > 3
    runs = [
        run_ranks(train_bf16, 2, zero, timeout=60)[0]
        for zero in (offload(tmp_path, "cpu"), offload(tmp_path, "nvme", "nvme"))
    ]
    assert runs[0] == runs[1]
    assert runs[0][1] == checked
    assert runs[0][0] == pytest.approx(want, rel=1e-2)  # a step apart in the last bit of bf16 now and then
