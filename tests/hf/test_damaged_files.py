"""Files that a Trainer has beside zero/: what one rank cannot write or read is said by all, with the file's name."""

from __future__ import annotations

import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import hf_zero
from hf_zero.checkpoint.consolidate import ConsolidateError, consolidate
from hf_zero.cli.main import main
from tests.harness.ranks import run_ranks
from tests.hf import runs

SOON_S = 8.0


def make(stage: int, folder: str, **more: Any) -> Any:
    arguments = runs.arguments(folder, max_steps=2, save_steps=1, save_strategy="steps", **more)
    args = hf_zero.TrainingArguments(**arguments, zero=runs.zero_config(stage))
    return hf_zero.Trainer(model=runs.build(), args=args, train_dataset=runs.examples(40, 1))


# -------------------------------------------------------------------- writing
def save_on_a_full_disk(stage: int, folder: str, victim: int) -> None:
    trainer = make(stage, folder)
    if trainer.args.process_index == victim:  # a file may not grow beyond it: of all, the weights are the largest
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    began = time.monotonic()
    try:
        trainer.train()
    finally:
        assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_one_rank_cannot_write(stage: int, tmp_path: Path) -> None:
    found = run_ranks(save_on_a_full_disk, 2, stage, str(tmp_path), 0, init_group=False, expect_error=True)
    for failure in found:
        assert failure.kind == "CheckpointError", failure.traceback
        assert f"rank 0: cannot write {tmp_path}/checkpoint-1" in failure.message, failure.message
        assert "File too large (os error 27)" in failure.message and "bytes are free" in failure.message


def save_over(folder: str) -> None:
    make(1, folder).train()


@pytest.mark.parametrize("name", ["rng_state_1.pth", "trainer_state.json", "scheduler.pt"])
def test_another_file_that_one_rank_cannot_write(name: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1" / name).mkdir(parents=True)  # where the file should go
    found = run_ranks(save_over, 2, str(tmp_path), init_group=False, expect_error=True)
    rank = 1 if name.startswith("rng") else 0
    for failure in found:
        assert failure.kind == "CheckpointError", failure.traceback
        assert f"rank {rank}: cannot write {tmp_path}/checkpoint-1" in failure.message, failure.message
        assert name in failure.message, failure.message


def save_pretrained(folder: str) -> None:
    trainer = make(3, folder)
    trainer.args.save_strategy = "no"
    trainer.train()
    trainer.model.save_pretrained(folder + "/a file/weights")


def test_save_pretrained_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    for failure in run_ranks(save_pretrained, 2, str(tmp_path), init_group=False, expect_error=True):
        assert failure.kind == "CheckpointError"
        assert f"rank 0: cannot write {tmp_path}/a file/weights: NotADirectoryError" in failure.message


# -------------------------------------------------------------------- reading
@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save_over, 2, str(folder), init_group=False)
    return folder


def resume(folder: str, asked: Any) -> int:
    began = time.monotonic()
    trainer = make(1, folder)
    try:
        trainer.args.max_steps = 3
        trainer.train(resume_from_checkpoint=asked)
    finally:
        assert time.monotonic() - began < SOON_S
    return int(trainer.state.global_step)


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = bytearray()
    else:
        data[data.find(b"last_epoch") + 3] ^= 0x55
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("trainer_state.json", "cut"),
        ("trainer_state.json", "empty"),
        ("scheduler.pt", "flip"),
        ("scheduler.pt", "empty"),
        ("rng_state_1.pth", "cut"),
        ("rng_state_0.pth", "empty"),
    ],
)
def test_a_damaged_file_is_named_by_all(
    saved: Path, name: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(saved, folder)
    newest = folder / "checkpoint-2"
    assert main(["inspect", str(newest), "--verify"]) == 0
    damage(newest / name, how)
    capsys.readouterr()
    assert main(["inspect", str(newest), "--verify"]) == 1
    said = capsys.readouterr().err
    assert f"{newest / name} is damaged" in said and len(said.splitlines()) == 1, said
    for failure in run_ranks(resume, 2, str(folder), str(newest), init_group=False, expect_error=True):
        assert failure.kind == "CheckpointError", failure.traceback
        assert str(newest / name) in failure.message and "damaged" in failure.message, failure.message
    if not name.startswith("rng"):  # known before training: the newest whole one is taken
        assert run_ranks(resume, 2, str(folder), True, init_group=False) == [3, 3]


def test_a_damaged_config_is_one_line(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    shutil.copytree(saved / "checkpoint-2", folder)
    for text in ("{", "[1]", '"x"', "\udcff"):
        (folder / "config.json").write_text(text, errors="surrogateescape")
        assert main(["consolidate", str(folder), str(out)]) == 1
        said = capsys.readouterr().err
        assert f"{folder}/config.json is damaged" in said and len(said.splitlines()) == 1, said
        with pytest.raises(ConsolidateError, match=r"config\.json is damaged"):
            consolidate(folder, out)
        assert not out.exists()
    consolidate(folder, tmp_path / "out.safetensors")  # which needs none
