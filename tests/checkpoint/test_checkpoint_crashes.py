"""Saves that die: at any moment the folder holds the old checkpoint or the new one, and a full disk loses nothing."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import load_fp32_state_dict
from hf_zero.checkpoint.folders import read_manifest
from hf_zero.checkpoint.format import manifest_path, zero_folder
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.checkpoint.writer import abandon, build_manifest, commit, discard, prepare_folder, write_rank_file
from hf_zero.errors import CheckpointError
from hf_zero.native.aio import AioFile, AioQueue
from tests.checkpoint.test_resume import start, steps
from tests.harness.checkpoints import assert_holds, in_child, make_model, only_frozen, save, save_info
from tests.harness.ranks import RankFailure, run_ranks, try_ranks


def test_overwriting_keeps_one_whole_checkpoint_and_no_leftovers(tmp_path: Path) -> None:
    old, new = make_model(1), make_model(2)
    save(tmp_path, old, 4)
    old_files = {file.name for file in read_manifest(tmp_path).files}
    layouts = new.layouts(2)
    save_id = prepare_folder(tmp_path)
    records = [write_rank_file(tmp_path, r, new.rank_states(layouts, r), save_id=save_id) for r in range(2)]
    assert_holds(tmp_path, old)
    discard(tmp_path)  # another rank failed
    assert_holds(tmp_path, old)
    assert {path.name for path in zero_folder(tmp_path).iterdir()} == {*old_files, "manifest.json"}
    with pytest.raises(AssertionError):
        build_manifest(save_info(new, layouts), records[:1])
    save(tmp_path, new, 2)
    assert_holds(tmp_path, new)
    names = {file.name for file in read_manifest(tmp_path).files}
    assert not names & old_files
    assert {path.name for path in zero_folder(tmp_path).iterdir()} == {*names, "manifest.json"}
    assert (tmp_path / "consolidate.py").is_file()


def die_at_call(number: int) -> None:
    """Make this process die without a word at the n-th call that changes a file; a write is cut in half first."""
    left = number

    def lethal(call: Callable[..., Any], is_write: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if is_write:
                    call(args[0], args[1][: len(args[1]) // 2])
                os._exit(9)
            return call(*args, **kwargs)

        return wrapped

    for name in ("open", "write", "fsync", "replace", "unlink", "mkdir"):
        setattr(os, name, lethal(getattr(os, name), name == "write"))
    for method in ("preallocate", "close"):
        setattr(AioFile, method, lethal(getattr(AioFile, method), False))
    AioQueue.write = lethal(AioQueue.write, False)  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("overwrites", [False, True])
def test_death_of_one_process_that_writes_all_files(tmp_path: Path, overwrites: bool) -> None:
    """The process dies at any system call: the folder holds the old checkpoint or the new one. Ranks of their own are
    killed below.
    """
    old, new = only_frozen(make_model(1)), only_frozen(make_model(2))
    outcomes = []
    for number in range(1, 200):
        folder = tmp_path / f"run-{number}"
        if overwrites:
            save(folder, old, 2)

        def work(number: int = number, folder: Path = folder) -> None:
            die_at_call(number)
            save(folder, new, 3)

        status = in_child(work)
        assert status in (0, 9)
        if manifest_path(folder).exists():
            step = "new" if read_manifest(folder).world_size == 3 else "old"
            assert_holds(folder, new if step == "new" else old)
        else:
            assert not overwrites, "the only checkpoint is gone"
            step = "none"
        outcomes.append(step)
        save(folder, new, 1)  # and the next save works and cleans up
        assert_holds(folder, new)
        assert len(list(zero_folder(folder).iterdir())) == 2
        if status == 0:
            break
    assert status == 0, "the save never came to its end"
    assert len(outcomes) > 15
    assert sorted(set(outcomes)) == ["new", "old" if overwrites else "none"]
    assert outcomes == sorted(outcomes, key="none old new".split().index), "it went back to the old one"


def save_and_die(folder: str, until: int, victim: int, number: int) -> dict[str, torch.Tensor]:
    """Train, and save; rank `victim` dies at its n-th call that changes a file (0: it does not)."""
    engine = start(2, seed=0)
    steps(engine, 0, until)
    weights: dict[str, torch.Tensor] = engine.full_state_dict(keep=True)
    if engine.rank == victim and number:
        die_at_call(number)
    engine.save_checkpoint(folder, "tag", client_state=until)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "every"), [(0, 4), (1, 1)])  # rank 0 makes many calls, and all are tried above
def test_death_of_a_rank_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, victim: int, every: int) -> None:
    """Two ranks, each with its file; the other one goes on, is told, and cleans up what it may."""
    wanted = {until: run_ranks(save_and_die, 2, str(tmp_path / "clean"), until, 0, 0)[0] for until in (1, 2)}
    run_ranks(save_and_die, 2, str(tmp_path / "old"), 1, 0, 0)
    held = []
    for number in range(1, 100, every):
        folder = str(tmp_path / f"run-{number}")
        shutil.copytree(tmp_path / "old", folder)
        job = (save_and_die, (folder, 2, victim, number), {})
        ended = try_ranks(job, 2, timeout=40)
        assert not ended.hang
        died = isinstance(ended.outcomes[victim], RankFailure)
        if died:
            assert ended.outcomes[victim].kind == "Died"
        with open_checkpoint(Path(folder, "tag")) as reader:
            reader.verify()
            held.append(reader.manifest.global_step)
            assert reader.manifest.client_state == held[-1]
        weights = load_fp32_state_dict(folder)
        for name, tensor in wanted[held[-1]].items():
            assert torch.equal(weights[name].reshape(tensor.shape), tensor.float()), (number, name)
        if not died:
            break
    assert not died, "the save never came to its end"
    assert held == sorted(held) and held[0] == 1 and held[-1] == 2
    assert len(held) > 5


def test_full_disk_is_named_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_model(1), make_model(2, scale=400)
    save(tmp_path, old, 2)
    before = sorted(zero_folder(tmp_path).iterdir())
    message = tmp_path / "message"

    def work() -> None:
        save_id = prepare_folder(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            write_rank_file(tmp_path, 0, new.rank_states(new.layouts(1), 0), save_id=save_id)
        except CheckpointError as error:
            message.write_text(str(error))

    assert in_child(work) == 0
    assert message.read_text().startswith(f"cannot write {zero_folder(tmp_path)}/rank-00000.")
    assert "File too large" in message.read_text()
    assert sorted(zero_folder(tmp_path).iterdir()) == before

    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if bytes(data[:1]) == b"{":  # the manifest
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    manifest = read_manifest(tmp_path)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}/zero/manifest.json: No space left"):
        commit(tmp_path, manifest, {})
    fresh = tmp_path / "fresh"
    prepare_folder(fresh)
    (fresh / "config.json").write_text("the user's")
    with pytest.raises(CheckpointError, match=r"zero/manifest\.json: No space left"):
        commit(fresh, dataclasses.replace(manifest, files=()), {fresh / "config.json": b"new"})
    abandon(fresh, [fresh / "config.json"])
    abandon(tmp_path)
    monkeypatch.undo()
    assert sorted(zero_folder(tmp_path).iterdir()) == before
    assert_holds(tmp_path, old)
    assert (tmp_path / "consolidate.py").is_file() and [*fresh.iterdir()] == [fresh / "config.json"]
    assert (fresh / "config.json").read_text() == "the user's"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"cannot make the folder {tmp_path}/file/zero: Not a directory"):
        prepare_folder(tmp_path / "file")
