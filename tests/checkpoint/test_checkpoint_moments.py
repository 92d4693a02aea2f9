"""Saves and loads at moments that nobody plans: inside a window, twice, into what is no folder, with a fault."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero import CheckpointError, StateError
from hf_zero.checkpoint import load as loading
from hf_zero.checkpoint import save as saving
from hf_zero.checkpoint import writer as save_module
from tests.harness.checkpoints import assert_holds, make_model, save
from tests.harness.ranks import run_ranks

SOON_S = 8.0
STAGES = [0, 1, 2, 3]


class Net(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 7), nn.Linear(7, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x))))).pow(2).mean()


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def reference(last: int, *, without: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """torch alone: both ranks' batches, two micro-batches per step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(last):
        for micro in (0, 1):
            if 2 * step + micro not in without:
                for rank in (0, 1):
                    (model(batch(2 * step + micro, rank)) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def start(stage: int, seed: int = 0, scheduler: Callable[..., Any] | None = None) -> Any:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 10}
    batches = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    config = {"zero_optimization": zero, **batches}
    schedule = None if scheduler is None else scheduler(optimizer)
    return hf_zero.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


def micro(engine: Any, number: int) -> None:
    engine.backward(engine(batch(number, engine.rank)))


def check(engine: Any, want: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(engine.full_state_dict(keep=True), want, rtol=1e-5, atol=1e-6)


def inside_windows(stage: int, folder: str) -> None:
    engine = start(stage)
    micro(engine, 0)
    engine.save_checkpoint(folder, "after a backward")
    engine.step()
    with engine.no_sync():
        engine.save_checkpoint(folder, "without sync")
    micro(engine, 1)
    engine.save_checkpoint(folder, "before the step")
    engine.step()
    check(engine, reference(1))  # nothing was lost, nothing counted twice
    for number in (2, 3):
        with torch.no_grad():
            engine.save_checkpoint(folder, "without grad")
        micro(engine, number)
        engine.step()
    check(engine, reference(2))
    initial = start(stage)
    before = initial.full_state_dict(keep=True)
    for tag in ("after a backward", "without sync", "before the step"):
        other = start(stage, seed=1)
        other.load_checkpoint(folder, tag)
        torch.testing.assert_close(other.full_state_dict(keep=True), before, rtol=0, atol=0)
    # A load in the middle of a window begins it anew.
    micro(other, 50)
    other.step()
    micro(other, 51)
    other.load_checkpoint(folder, "without grad")
    other.load_checkpoint(folder, "without grad")
    for number in (2, 3):
        micro(other, number)
        other.step()
    check(other, reference(2))


@pytest.mark.parametrize("stage", STAGES)
def test_inside_a_window(stage: int, tmp_path: Path) -> None:
    assert not torch.equal(reference(1)["a.weight"], reference(2)["a.weight"])
    run_ranks(inside_windows, 2, stage, str(tmp_path))


# -------------------------------------------------------------------- places
def no_folders(folder: str) -> None:
    engine = start(3)
    Path(folder, "file").write_text("")
    for place, tag, says in (
        (folder + "/file", "a", "Not a directory|File exists"),
        (folder, "file", "File exists|Not a directory"),
        ("/proc/nowhere", "a", "cannot make the folder"),
        (folder, "a" * 300, "File name too long"),
    ):
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=says) as caught:
            engine.save_checkpoint(place, tag)
        assert time.monotonic() - began < SOON_S and str(caught.value).startswith("rank 0: "), caught.value
    for place, tag in ((folder + "/file", "a"), (folder, "file"), (folder, "a" * 300)):
        with pytest.raises(CheckpointError, match="rank 1: "):
            engine.load_checkpoint(place, tag)
    Path(folder, "t").mkdir(exist_ok=True)
    engine.comm.barrier("made")
    Path(folder, "latest").mkdir(exist_ok=True)  # where the file should go
    engine.comm.barrier("made")
    with pytest.raises(CheckpointError, match=r"cannot write .*latest: Is a directory"):
        engine.save_checkpoint(folder, "t")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):  # a save that failed left nothing
        engine.load_checkpoint(folder, "t")
    assert sorted(path.name for path in Path(folder).iterdir()) == ["file", "latest"]


def test_what_is_no_folder(tmp_path: Path) -> None:
    run_ranks(no_folders, 2, str(tmp_path))


def test_files_that_rank_0_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes have folders of one name on their own disks."""
    model = make_model()
    save(tmp_path, model, 2)
    write = save_module.write_rank_file

    def elsewhere(folder: Path, rank: int, *args: Any, **kwargs: Any) -> Any:
        place = tmp_path / "node1" if rank else folder
        (place / "zero").mkdir(parents=True, exist_ok=True)
        return write(place, rank, *args, **kwargs)

    monkeypatch.setattr("tests.harness.checkpoints.write_rank_file", elsewhere)
    monkeypatch.setattr(save_module, "_VISIBLE_WITHIN_S", 0.2)
    with pytest.raises(CheckpointError, match=r"rank-00001\.[0-9a-f]+\.safetensors is missing(.|\n)*all nodes share"):
        save(tmp_path, make_model(seed=1), 2)
    assert_holds(tmp_path, model)  # the one before


def whole_weights_on_a_full_disk(stage: int, folder: str) -> None:
    engine = start(stage)
    if engine.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    for name in ("model.safetensors", "pytorch_model.bin"):
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=rf"rank 0: cannot write {folder}/{name}: "):
            engine.save_16bit_model(folder, name)
        assert time.monotonic() - began < SOON_S
    with pytest.raises(
        CheckpointError, match=r"rank 0: cannot write .*/a/zero/rank-00000.safetensors: File too large"
    ):
        engine.save_checkpoint(folder, "a")
    engine.comm.barrier("rank 0 has deleted what it made")
    assert not Path(folder, "a").exists() and not Path(folder, "latest").exists()


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_that_rank_0_cannot_write(stage: int, tmp_path: Path) -> None:
    run_ranks(whole_weights_on_a_full_disk, 2, stage, str(tmp_path))


# -------------------------------------------------------------------- one rank's fault
def faults(stage: int, folder: str, victim: int) -> None:
    """Not only what a disk raises: a bug, memory. What only rank 0 does is tried there alone."""
    engine = start(stage)
    micro(engine, 0), engine.step(), micro(engine, 1), engine.step()
    engine.save_checkpoint(folder, "good")
    want = engine.full_state_dict(keep=True)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no more")

    for name in ("check_info", "write_rank_file", "_load_weights", "read_states", *LEADERS * (victim == 0)):
        loads = name in ("_load_weights", "read_states")
        place = loading if loads else saving
        original = getattr(place, name)
        if engine.rank == victim:
            setattr(place, name, broken)
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=f"rank {victim}: MemoryError: no more") as caught:
            engine.load_checkpoint(folder) if loads else engine.save_checkpoint(folder, "bad")
        assert time.monotonic() - began < SOON_S, name
        causes = [type(error) for error in (caught.value, *chain(caught.value))]
        assert (MemoryError in causes) == (engine.rank == victim), "the traceback is that of the rank that failed"
        engine.comm.barrier("rank 0 has deleted what it made")
        assert loads or not Path(folder, "bad").exists(), name
        setattr(place, name, original)
        if loads:
            micro(engine, 2), engine.step(), micro(engine, 3)
            for call in (engine.step, lambda: engine.save_checkpoint(folder, "bad")):
                with pytest.raises(StateError, match="is not possible after the broken load of"):
                    call()
            engine.load_checkpoint(folder, load_optimizer_states=False)
            with pytest.raises(StateError, match="after the broken load"):
                engine.save_checkpoint(folder, "bad")
            engine.load_checkpoint(folder)
    torch.testing.assert_close(engine.full_state_dict(keep=True), want, rtol=0, atol=0)
    engine.save_checkpoint(folder, "bad")


def chain(error: BaseException) -> Iterator[BaseException]:
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


LEADERS = ("prepare_folder", "build_manifest", "commit")


@pytest.mark.parametrize(("stage", "victim"), [(1, 0), (3, 1)])
def test_whatever_goes_wrong_on_one_rank(stage: int, victim: int, tmp_path: Path) -> None:
    run_ranks(faults, 2, stage, str(tmp_path), victim)


# -------------------------------------------------------------------- schedules
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 4], 0.5),
    "in a row": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.MultiStepLR(o, [1, 2], 0.5)],
        [2],
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 6),
}


def rates(engine: Any, first: int, last: int) -> list[float]:
    found = []
    for number in range(2 * first, 2 * last):
        micro(engine, number)
        engine.step()
        found.append(engine.get_lr()[0])
    return found[1::2]


def scheduled(folder: str) -> dict[str, tuple[list[float], list[float], list[float]]]:
    found = {}
    for name, scheduler in SCHEDULES.items():
        engine = start(1, scheduler=scheduler)
        rates(engine, 0, 2)
        engine.save_checkpoint(folder, name)
        want = rates(engine, 2, 5)
        other = start(1, seed=1, scheduler=scheduler)
        other.load_checkpoint(folder, name)
        plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.01, momentum=0.9)
        schedule = scheduler(plain)
        alone = []
        for _ in range(5):
            plain.step(), schedule.step()
            alone.append(plain.param_groups[0]["lr"])
        found[name] = want, rates(other, 2, 5), alone[2:]
    return found


def test_schedules_go_on_after_a_resume(tmp_path: Path) -> None:
    for name, (want, got, alone) in run_ranks(scheduled, 1, str(tmp_path))[0].items():
        assert len(set(want)) > 1, f"{name}: vacuous"
        assert got == want == pytest.approx(alone), name
