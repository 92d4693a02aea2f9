"""Files that a Trainer has beside zero/: what one rank cannot write or read is said by all, with the file's name."""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hf_zero
from hf_zero.checkpoint.consolidate import consolidate
from hf_zero.checkpoint.format import ConsolidateError
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.main import main
from hf_zero.hf.trainer.resume import agree_on_checkpoint, checkpoint_to_resume
from tests.checkpoint.failed_saves import content
from tests.harness.damage import files_of, unseen_cuts, unseen_flips, verified
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


def resume_where(folder: str, asked: list[Any]) -> int:
    return resume(folder, asked[int(os.environ["RANK"])])


@pytest.mark.parametrize("asked", [[True, None], [None, "checkpoint-2"], ["checkpoint-1", False]])
def test_a_resume_that_is_asked_for_on_some_ranks_only(saved: Path, asked: list[Any]) -> None:
    """A rank that looks for a checkpoint by itself, or too early: all ranks say so, at once."""
    paths = [str(saved / one) if isinstance(one, str) else one for one in asked]
    first, second = run_ranks(resume_where, 2, str(saved), paths, init_group=False, expect_error=True)
    assert first.kind == second.kind == "CheckpointError", first.traceback
    resuming = 0 if asked[0] else 1
    for failure in (first, second):
        assert f"rank(s) [{resuming}] would resume from {paths[resuming]}" in failure.message
        assert f"rank(s) [{1 - resuming}] would start anew" in failure.message
        assert f"Called from: {__file__}:" in failure.message


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


def load_says(folder: Path) -> str:
    """Return what a resume says of the files in `folder` before training: an error, or warnings."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("hf_zero.hf.trainer.resume")
    logger.addHandler(handler)
    try:
        args = SimpleNamespace(output_dir=str(folder.parent), process_index=0)
        agree_on_checkpoint(args, str(folder))
    except CheckpointError as error:
        return str(error)
    finally:
        logger.removeHandler(handler)
    return said.getvalue()


def test_damage_to_any_file_is_named(saved: Path, tmp_path: Path) -> None:
    """`inspect --verify` names bits, a resume cuts. tests/nightly/test_flipped_bits.py does the same at length."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(saved / "checkpoint-2", folder)
    names = {path.relative_to(folder).as_posix() for path in files_of(folder)}
    assert {"checksums.json", "trainer_state.json", "rng_state_1.pth", "consolidate.py", "zero/manifest.json"} <= names
    assert verified(folder) == "" and load_says(folder) == ""
    assert unseen_flips(folder, 24, seed=1) == []
    assert unseen_cuts(folder, 1, lambda: load_says(folder)) == []


def test_files_may_be_edited_added_and_deleted(saved: Path, tmp_path: Path) -> None:
    """It is said, and nothing is refused; without a list everything is as before."""
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(saved / "checkpoint-2", folder)
    state = folder / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"note": "mine"}))
    (folder / "notes.json").write_text("{ not JSON, nor mine to read")
    (folder / "generation_config.json").unlink()
    said = load_says(folder)
    assert "trainer_state.json has" in said and "generation_config.json is missing" in said and "notes" not in said
    assert checkpoint_to_resume(tmp_path, True) == str(folder)
    assert "trainer_state.json has" in verified(folder)
    (folder / "checksums.json").unlink()
    assert load_says(folder) == ""
    (folder / "checksums.json").write_text('{"files":{"../../x":[1,1]},"crc32":0}')
    assert "checksums.json is damaged" in load_says(folder)


def save_and_die(folder: str) -> None:
    """The second save into a folder breaks off."""
    trainer = make(1, folder)
    trainer.save_model = lambda *args, **kwargs: (_ for _ in ()).throw(OSError("gone"))
    trainer.train()


def test_a_save_that_breaks_off_leaves_what_was_there(saved: Path, tmp_path: Path) -> None:
    """The list of the first save would name files that are new: list and files are those of before."""
    folder = tmp_path / "out"
    shutil.copytree(saved, folder)
    before = content(str(folder))
    assert "checkpoint-1/checksums.json" in before
    run_ranks(save_and_die, 1, str(folder), init_group=False, expect_error=True)
    assert content(str(folder)) == before


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
