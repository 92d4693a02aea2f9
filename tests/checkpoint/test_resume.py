"""A checkpoint loads at any world size and stage, and its consolidated weights are the masters."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.checkpoint.consolidate import consolidate
from hf_zero.checkpoint.format import manifest_path
from hf_zero.layout import ALIGN, UnitLayout
from tests.harness.checkpoints import with_unaligned_parts
from tests.harness.ranks import run_ranks

STEPS_BEFORE, STEPS_AFTER, ROWS = 4, 5, 12  # rows: for 1 to 4 ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.frozen * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Tied, frozen, a buffer, sizes that no world size divides."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 13)
        self.blocks = nn.ModuleList(Block(13) for _ in range(3))
        self.head = nn.Linear(13, 31, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        self.calls += 1
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.roll(-1, 1).flatten())


# Media that a checkpoint may be saved on and resumed from, for tests that say "medium".
MEDIA = ("none", "cpu", "nvme", "nvme and parameters")


def offload(medium: str) -> dict[str, Any]:
    """Return keys of zero_optimization. Tiles of 61 elements cut runs at odd places."""
    if medium == "none":
        return {}
    device, _, params = medium.partition(" and ")
    block = {"device": device, "nvme_path": tempfile.gettempdir()}
    more = {"offload_param": {**block, "max_in_cpu": 0}} if params else {}
    return {"offload_optimizer": block, "sub_group_size": 61, **more}


def start(
    stage: int,
    seed: int,
    *,
    bf16: bool = False,
    medium: str = "none",
    bucket: int = 150,
    in_background: bool = False,
    clip: float = 0.5,
    **checkpoint: Any,
) -> Any:
    torch.manual_seed(seed)
    model = Net()
    decay = [param for param in model.parameters() if param.requires_grad and param.dim() > 1]
    rest = [param for param in model.parameters() if param.requires_grad and param.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": bucket}
        | offload(medium),
        "bf16": {"enabled": bf16},
        "gradient_clipping": clip,
        "checkpoint": {"async": in_background} | checkpoint,
    }
    return hf_zero.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def steps(engine: Any, first: int, last: int) -> list[float]:
    """The same global batch whatever the world size; the mean loss over it."""
    losses = []
    for step in range(first, last):
        ids = torch.randint(0, 31, (ROWS, 9), generator=torch.Generator().manual_seed(step))
        loss = engine(ids.chunk(engine.world_size)[engine.rank])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
    return losses


def save(stage: int, folder: str, bf16: bool = False, medium: str = "none") -> dict[str, Any]:
    engine = start(stage, seed=0, bf16=bf16, medium=medium)
    steps(engine, 0, STEPS_BEFORE)
    engine.save_checkpoint(Path(folder).parent, Path(folder).name, client_state={"epoch": 3})
    weights = engine.full_state_dict(keep=engine.rank == 0)
    losses = steps(engine, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
    return {"losses": losses, "weights": weights, "lr": engine.lr_scheduler.get_last_lr()}


def save_with_unaligned_parts(stage: int, folder: str) -> dict[str, Any]:
    build = UnitLayout.build
    with mock.patch.object(UnitLayout, "build", lambda *args, **keys: with_unaligned_parts(build(*args, **keys))):
        return save(stage, folder)


def save_each(places: list[tuple[int, str, str]]) -> list[dict[str, Any]]:
    """`save` at each (stage, folder, medium), by the same processes."""
    return [save(stage, folder, medium=medium) for stage, folder, medium in places]


def resume_each(stage: int, folders: list[str], medium: str) -> list[dict[str, Any]]:
    """`resume` from each folder, by the same processes, into a new model each."""
    return [resume(stage, folder, medium=medium) for folder in folders]


def resume_with_whole_units(stage: int, folder: str) -> dict[str, Any]:
    return resume(stage, folder, bucket=10**9)


def resume(stage: int, folder: str, bf16: bool = False, medium: str = "none", *, bucket: int = 150) -> dict[str, Any]:
    engine = start(stage, seed=99, bf16=bf16, medium=medium, bucket=bucket)
    path, client_state = engine.load_checkpoint(folder)
    assert Path(path) == Path(folder) and client_state == {"epoch": 3}
    assert engine.global_steps == STEPS_BEFORE and float(engine.module.calls) == STEPS_BEFORE
    weights = engine.full_state_dict(keep=engine.rank == 0)
    losses = steps(engine, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
    return {"losses": losses, "weights": weights, "lr": engine.lr_scheduler.get_last_lr()}


@pytest.mark.parametrize("saved_stage", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_resume_at_another_world_size_and_stage(saved_stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    want = run_ranks(save, 2, saved_stage, folder)[0]
    assert want["losses"][0] != want["losses"][-1]
    for world, stage in ((2, saved_stage), (1, 3), (3, 3), (2, 1), (3, 2), (2, 0), (1, 0)):
        got = run_ranks(resume, world, stage, folder)[0]
        label = f"saved on 2 ranks at stage {saved_stage}, resumed on {world} at stage {stage}"
        for name, tensor in want["weights"].items():
            assert torch.equal(got["weights"][name], tensor), f"{label}: {name}"
        exact = (world, stage) == (2, saved_stage)
        assert got["losses"] == (want["losses"] if exact else pytest.approx(want["losses"], rel=1e-6)), label
        assert got["lr"] == want["lr"], label


def test_resume_with_another_cut(tmp_path: Path) -> None:
    """The buckets have another size, or the layouts that earlier checkpoints have: sizes come from the manifest."""
    folder = str(tmp_path / "checkpoint")
    want = run_ranks(save_with_unaligned_parts, 3, 3, folder)[0]
    sizes = [unit["padded_numel"] for unit in json.loads(manifest_path(Path(folder)).read_bytes())["layouts"]]
    assert any(size % (3 * ALIGN) for size in sizes), "vacuous: this is how they are padded now"
    for world, resumed in ((3, resume), (3, resume_with_whole_units), (2, resume_with_whole_units)):
        got = run_ranks(resumed, world, 3, folder)[0]
        for name, tensor in want["weights"].items():
            assert torch.equal(got["weights"][name], tensor), (world, resumed, name)
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-6), (world, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved_on", [*(pytest.param(medium, marks=pytest.mark.nightly) for medium in MEDIA[1:3]), MEDIA[3]]
)
def test_resume_on_another_medium(saved_on: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    want = run_ranks(save, 2, 3, folder, False, saved_on)[0]
    for world, stage, medium in ((2, 3, "cpu"), (2, 3, "nvme"), (2, 3, "none"), (3, 3, "nvme and parameters")):
        got = run_ranks(resume, world, stage, folder, False, medium)[0]
        label = f"saved on {saved_on}, resumed on {medium} by {world} ranks"
        for name, tensor in want["weights"].items():
            assert torch.equal(got["weights"][name], tensor), f"{label}: {name}"
        exact = world == 2 and medium != "none"
        assert got["losses"] == (want["losses"] if exact else pytest.approx(want["losses"], rel=1e-6)), label
    back = run_ranks(resume, 1, 2, folder, False, "cpu")[0]["losses"]
    assert back == pytest.approx(want["losses"], rel=1e-6)


@pytest.mark.slow
def test_resume_with_separate_masters(tmp_path: Path) -> None:
    """bf16 parameters: the fp32 masters come back, not their rounded copies."""
    folder = str(tmp_path / "checkpoint")
    want = run_ranks(save, 2, 3, folder, True)[0]
    for world, stage in ((2, 3), (2, 2)):
        assert run_ranks(resume, world, stage, folder, True)[0]["losses"] == want["losses"], (world, stage)
    on_disk = run_ranks(resume, 2, 3, folder, True, "nvme and parameters")[0]["losses"]
    assert on_disk == pytest.approx(want["losses"], rel=1e-2)


def test_stage_0_saves_what_stage_3_resumes(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    want = run_ranks(save, 2, 0, folder)[0]
    got = run_ranks(resume, 3, 3, folder)[0]
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-6)


@pytest.mark.slow
def test_consolidated_weights_are_the_masters(tmp_path: Path) -> None:
    for stage in (1, 3):
        folder, out = str(tmp_path / f"checkpoint{stage}"), tmp_path / f"out{stage}"
        want = run_ranks(save, 3, stage, folder)[0]["weights"]
        consolidate(folder, str(out))
        got = load_file(out / "model.safetensors")
        assert got.keys() == want.keys() - {"head.weight"}, "tied weights are written once"
        for name, tensor in got.items():
            assert torch.equal(tensor, want[name]), name


def other_optimizer(folder: str) -> None:
    engine = start(3, seed=0)
    plain = hf_zero.initialize(
        model=(model := Net()),
        optimizer=torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1),
        config={"zero_optimization": {"stage": 3}},
    )[0]
    engine.save_checkpoint(folder)
    plain.load_checkpoint(folder)


def other_model(folder: str) -> None:
    engine = start(3, seed=0)
    engine.save_checkpoint(folder)
    model = nn.Linear(13, 4)
    hf_zero.initialize(model=model, config={"zero_optimization": {"stage": 2}})[0].load_checkpoint(folder)


def torn(folder: str) -> None:
    engine = start(3, seed=0)
    engine.save_checkpoint(folder, "whole")
    engine.save_checkpoint(folder, "torn")
    if engine.rank == 0:
        with open(f"{folder}/torn/zero/rank-00001.safetensors", "r+b") as file:
            file.truncate(100)
    dist.barrier()
    engine.load_checkpoint(folder)


def flipped(folder: str) -> None:
    engine = start(3, seed=0)
    engine.write_checkpoint(folder)
    if engine.rank == 0:
        with open(f"{folder}/zero/rank-00001.safetensors", "r+b") as file:
            file.seek(-3, 2)
            file.write(b"\x55")
    dist.barrier()
    engine.load_checkpoint(folder)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (other_optimizer, ["AdamW", "SGD"]),
        (other_model, ["weight", "bias"]),
        (torn, ["rank-00001.safetensors", "whole"]),
        (flipped, ["rank-00001.safetensors", "checksum"]),
    ],
)
def test_what_cannot_be_loaded_is_said_on_every_rank(function: Any, said: list[str], tmp_path: Path) -> None:
    failures = run_ranks(function, 2, str(tmp_path), expect_error=True)
    for failure in failures:
        assert failure.kind == "CheckpointError", failure
        for text in said:
            assert text in failure.message, failure.message
