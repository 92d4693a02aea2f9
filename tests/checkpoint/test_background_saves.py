"""Saves in the background: training goes on untouched, failures are said on all ranks, what is published loads."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_zero
from hf_zero.checkpoint import background, writer
from hf_zero.checkpoint import save as saving
from hf_zero.checkpoint.format import manifest_path, zero_folder
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.distributed import process_end
from hf_zero.errors import CheckpointError
from hf_zero.hf.trainer.resume import why_torn
from hf_zero.sharding.shard import StagedShard
from tests.checkpoint.test_resume import start, steps
from tests.harness.ranks import RankFailure, run_ranks, try_ranks
from tests.harness.save_faults import POINTS, at, kill, slow_down
from tests.hf.runs import arguments, build, examples, zero_config

RUNS = [(0, "none"), (3, "none"), (2, "cpu"), (3, "nvme and parameters")]
SAVES = 3  # of each; tests/nightly/test_checkpoint_faults.py makes 50


def saves_in_a_row(root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage, medium in RUNS:
        plain = start(stage, 0, medium=medium)
        wanted = steps(plain, 0, SAVES + 3)
        plain.teardown()
        engine = start(stage, 0, medium=medium, in_background=True)
        folder = f"{root}/{stage} {medium}"
        losses, memory = [], []
        for step in range(SAVES):
            losses += steps(engine, step, step + 1)
            memory.append(engine.checkpoints._background._memory.nbytes)  # taken beside the first step
            engine.save_checkpoint(folder, client_state=step)
            memory.append(engine.checkpoints._background._memory.nbytes)
        losses += steps(engine, SAVES, SAVES + 3)
        engine.finish_saves()
        _, saved = engine.load_checkpoint(folder)
        losses_again = steps(engine, SAVES, SAVES + 3)
        engine.teardown()
        found[f"{stage} {medium}"] = (wanted, losses, losses_again, memory, saved)
    found["threads"] = [thread.name for thread in threading.enumerate() if "save" in thread.name]
    return found


def test_training_is_untouched(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(saves_in_a_row, 2, str(tmp_path), timeout=120)):
        assert found.pop("threads") == []
        for name, (wanted, losses, again, memory, saved) in found.items():
            assert losses == wanted, name
            assert again == wanted[SAVES:], name
            assert saved == SAVES - 1
            assert len(set(memory)) == 1, (name, memory)  # taken once, and used again
            assert (memory[0] == 0) == (rank == 1 and name == "0 none")  # rank 0 holds everything
    for stage, medium in RUNS:
        for step in range(SAVES):
            folder = tmp_path / f"{stage} {medium}" / f"global_step{step + 1}"
            with open_checkpoint(folder) as reader:
                reader.verify()
                assert reader.manifest.global_step == step + 1
            assert len([*zero_folder(folder).iterdir()]) == len(reader.manifest.files) + 1


def slow_saves(folder: str) -> dict[str, Any]:
    engine = start(3, 0, in_background=True)
    steps(engine, 0, 1)
    slow_down("a rank file begins", 1.5)
    began = time.monotonic()
    engine.save_checkpoint(folder, "first")
    returned = time.monotonic()
    steps(engine, 1, 6)
    trained = time.monotonic()
    published = manifest_path(f"{folder}/first").exists()
    called: list[float] = []
    engine.checkpoints.when_published(lambda: called.append(time.monotonic()))
    engine.save_checkpoint(folder, "second")  # waits for the first
    second = time.monotonic()
    engine.load_checkpoint(folder)  # waits for the second
    engine.checkpoints.when_published(lambda: called.append(0.0))
    return {
        "stall": returned - began,
        "steps": trained - returned,
        "published while training": published,
        "second save after": second - began,
        "called after": called[0] - began,
        "called at once": called[1:] == [0.0],
        "loaded": engine.global_steps,
        "latest": Path(folder, "latest").read_text(),
    }


@pytest.mark.slow
def test_a_slow_writer_stops_nobody(tmp_path: Path) -> None:
    for found in run_ranks(slow_saves, 2, str(tmp_path)):
        assert found["stall"] < 1 and found["steps"] < 1.4
        assert not found["published while training"]
        assert 1.5 <= found["called after"] <= found["second save after"]
        assert found["called at once"]
        assert (found["loaded"], found["latest"]) == (6, "second")


def slow_saves_from_disk(folder: str) -> dict[str, Any]:
    """States are read from the disk when updates have long changed them; one way to update is staged, one is not."""
    found = {}
    for stage, clip in ((2, 0.5), (3, 0.0)):
        losses = []
        for in_background in (False, True):
            engine = start(stage, 0, medium="nvme and parameters", in_background=in_background, clip=clip)
            steps(engine, 0, 2)
            if in_background:
                slow_down("a rank file begins", 0.6)
            engine.save_checkpoint(f"{folder}/{stage}{in_background}", "saved")
            losses.append(steps(engine, 2, 6))
            published = manifest_path(f"{folder}/{stage}{in_background}/saved").exists()
            engine.load_checkpoint(f"{folder}/{stage}{in_background}")
            losses.append(steps(engine, 2, 6))
            stores = {id(store): store for store in stores_on_disk(engine)}.values()
            kept = [region for store in stores for region in [*store._kept, *store._retired]]
            assert len(stores) > 0 and published != in_background
            engine.teardown()
        found[f"{stage}, {clip}"] = (losses, kept)
    return found


def stores_on_disk(engine: Any) -> list[Any]:
    return [flat.master.store for unit in engine.units for flat in unit.flats if isinstance(flat.master, StagedShard)]


@pytest.mark.slow
def test_states_on_a_disk_are_saved_as_they_were(tmp_path: Path) -> None:
    for found in run_ranks(slow_saves_from_disk, 2, str(tmp_path), timeout=120):
        for name, (losses, kept) in found.items():
            assert losses[1:] == losses[:-1] and len(set(losses[0])) == 4, name
            assert kept == []


def failing_saves(folder: str) -> dict[str, Any]:
    """Rank 1 cannot write the second checkpoint: its disk is full; then its folder is removed below the third."""
    writer._VISIBLE_WITHIN_S = 0.5  # a removed folder is waited for, as one that a network file system shows late
    engine = start(3, 0, in_background=True)
    steps(engine, 0, 1)
    engine.save_checkpoint(folder, "old", client_state="old")
    engine.finish_saves()
    found: dict[str, Any] = {}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    engine.save_checkpoint(folder, "full")
    for step in range(1, 400):
        try:
            steps(engine, step, step + 1)
        except CheckpointError as error:
            found["full"] = (engine.global_steps, str(error))
            assert not Path(folder, "full").exists()
            break
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if engine.rank == 0:
        at("a rank file begins", lambda: shutil.rmtree(f"{folder}/removed"))
    engine.save_checkpoint(folder, "removed")
    with pytest.raises(CheckpointError) as caught:
        engine.finish_saves()
    found["removed"] = str(caught.value)
    if engine.rank == 1:
        at("the snapshot", no_memory)
    engine.save_checkpoint(folder, "copied")  # rank 0 goes on: nobody waits for the others' copies
    with pytest.raises(CheckpointError) as caught:
        engine.finish_saves()
    found["copied"] = str(caught.value)
    assert not Path(folder, "copied").exists()
    found["old"] = engine.load_checkpoint(folder)[1]
    engine.save_checkpoint(folder, "full")
    engine.finish_saves()
    at("a rank file begins", lambda: shutil.rmtree(f"{folder}/ending", ignore_errors=True))
    engine.save_checkpoint(folder, "ending")
    with pytest.raises(CheckpointError, match="ending was not saved"):
        engine.teardown()
    weights = [parameter.numel() for parameter in engine.module.parameters()]
    found["given back"] = 0 not in weights and not engine.comm.is_connected
    return found


def no_memory() -> None:
    raise MemoryError("there is none")


def test_what_fails_is_said_on_all_ranks_in_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(failing_saves, 2, str(tmp_path))
    assert first == second
    path = zero_folder(tmp_path / "full") / "rank-00001.safetensors"
    assert first["full"][1].startswith(f"{tmp_path}/full was not saved in the background: rank 1: cannot write {path}")
    assert f"{tmp_path}/removed was not saved" in first["removed"]
    # A rank that was writing finds no file; one that was about to finds no folder.
    assert "No such file or directory" in first["removed"] or "does not see it" in first["removed"]
    assert "copied was not saved in the background: rank 1: MemoryError: there is none" in first["copied"]
    assert first["old"] == "old"
    assert first["given back"]  # a failure at the end leaves nothing of the engine behind
    with open_checkpoint(tmp_path / "full") as reader:  # the one that was saved at last
        reader.verify()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["full", "old"]
    assert (tmp_path / "latest").read_text() == "full"


def save_and_be_killed(folder: str, point: str, victims: list[int], in_background: bool = True) -> None:
    engine = start(2, 0, in_background=in_background)
    steps(engine, 0, 1)
    engine.save_checkpoint(folder, "one")
    engine.finish_saves()
    steps(engine, 1, 2)
    if engine.rank in victims:
        at(point, kill)
    engine.save_checkpoint(folder, "two")
    steps(engine, 2, 4)
    engine.finish_saves()


def newest_that_loads(folder: str) -> tuple[str | None, int]:
    engine = start(3, 7)
    path, _ = engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, "two")  # and what was left behind is in nobody's way
    return path, engine.global_steps


# The whole table, with all ranks killed too, is in tests/nightly/test_checkpoint_faults.py.
@pytest.mark.parametrize(
    ("point", "victims"),
    [
        ("the snapshot", [1]),
        ("tensors are written", [1]),
        ("rank 0 is told", [1]),
        ("a file gets its name", [0, 1]),
        ("the manifest is written", [0]),
    ],
)
def test_a_kill_leaves_what_was_published(point: str, victims: list[int], tmp_path: Path) -> None:
    ended = try_ranks((save_and_be_killed, (str(tmp_path), point, victims), {}), 2, timeout=40)
    assert not ended.hang
    assert all(isinstance(ended.outcomes[victim], RankFailure) for victim in victims)
    [(path, step)] = run_ranks(newest_that_loads, 1, str(tmp_path))
    assert path == f"{tmp_path}/one" and step == 1
    with open_checkpoint(tmp_path / "two") as reader:
        reader.verify()
        assert len([*zero_folder(tmp_path / "two").iterdir()]) == len(reader.manifest.files) + 1


def leave_without_a_word(folder: str) -> None:
    engine = start(3, 0, in_background=True)
    steps(engine, 0, 2)
    slow_down("a rank file begins", 0.3)
    engine.save_checkpoint(folder, "last")
    try:
        if engine.rank == 1:
            raise ValueError("a bug of the script")
    finally:
        end_saves()


def end_saves() -> None:
    """End the saves as Python's end does; ranks here are forked."""
    for save in list(process_end._TURNS[process_end.Turn.SAVES]):
        save.end_with_python()


def test_a_save_under_way_is_finished_at_the_end_of_the_script(tmp_path: Path) -> None:
    ended = try_ranks((leave_without_a_word, (str(tmp_path),), {}), 2, timeout=40)
    assert not ended.hang
    assert "a bug of the script" in str(ended.outcomes[1])
    with open_checkpoint(tmp_path / "last") as reader:
        reader.verify()
        assert reader.manifest.global_step == 2
    assert (tmp_path / "latest").read_text() == "last"


def many_saves_beside_none(folder: str, count: int) -> list[dict[str, Any]]:
    """Return losses, and the peak of memory in KiB after each step, of a run with no save and one with many."""
    found = []
    for in_background in (False, True):
        engine = start(3, 0, in_background=in_background)
        losses, memory = [], []
        for step in range(count):
            losses += steps(engine, step, step + 1)
            if in_background:
                engine.save_checkpoint(folder, "again" if step % 2 else "other")
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        engine.teardown()
        found.append({"losses": losses, "memory": memory})
    return found


def get_sigterm(folder: str) -> None:
    """Rank 1 gets the signal, while rank 0 waits for it in a step."""
    engine = start(3, 0, in_background=True)
    steps(engine, 0, 1)
    engine.save_checkpoint(folder, "first")
    engine.finish_saves()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    slow_down("a rank file begins", 0.5)
    engine.save_checkpoint(folder, "last")
    if engine.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    steps(engine, 1, 3)


def test_sigterm_ends_a_rank_after_its_save(tmp_path: Path) -> None:
    ended = try_ranks((get_sigterm, (str(tmp_path),), {}), 2, timeout=40)
    assert not ended.hang
    assert ended.outcomes[1].kind == "Died"  # of the signal, without an exception
    assert (tmp_path / "latest").read_text() == "last"
    with open_checkpoint(tmp_path / "last") as reader:
        reader.verify()


def write_hangs(folder: str) -> dict[str, Any]:
    """Rank 1's disk hangs. The training goes on; who waits for the save is told, and the next one works."""
    engine = start(3, 0, in_background=True)
    steps(engine, 0, 1)
    engine.comm.timeout_s = 2.0
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(background.__name__).addHandler(listener)
    write = saving.write_rank_file
    if engine.rank == 1:
        saving.write_rank_file = lambda *_, **__: time.sleep(40)
    engine.save_checkpoint(folder, "hangs")
    time.sleep(3)
    losses = steps(engine, 1, 3)
    warned, began = list(lines), time.monotonic()
    with pytest.raises(CheckpointError) as error:
        engine.finish_saves()
    lasted = time.monotonic() - began
    saving.write_rank_file = write
    engine.save_checkpoint(folder, "again")
    engine.finish_saves()
    return {"warned": warned, "error": str(error.value), "lasted": lasted, "losses": losses}


def test_a_rank_whose_disk_hangs_is_named(tmp_path: Path) -> None:
    first, second = run_ranks(write_hangs, 2, str(tmp_path))
    assert len(first["warned"]) == 1 and second["warned"] == []
    for text in (*first["warned"], first["error"], second["error"]):
        assert "rank(s) [1] have not written their files for" in text and str(tmp_path / "hangs") in text
    assert first["lasted"] < 10 and second["lasted"] < 20
    assert first["losses"] == second["losses"] and len(first["losses"]) == 2
    assert not manifest_path(tmp_path / "hangs").exists()
    assert (tmp_path / "latest").read_text() == "again"
    with open_checkpoint(tmp_path / "again") as reader:
        reader.verify()
        assert reader.manifest.global_step == 3


def is_stopped(folder: str, waits: str) -> str:
    """Rank 1 is stopped in the middle of its write, and goes on once rank 0 is through."""
    engine = start(3, 0, in_background=True)
    steps(engine, 0, 1)
    engine.comm.timeout_s = 2.0
    pids = engine.comm.all_gather_object(os.getpid(), "pids")
    if engine.rank == 1:
        at("a rank file begins", lambda: os.kill(os.getpid(), signal.SIGSTOP))
    engine.save_checkpoint(folder, "last")
    if engine.rank == 1:
        with pytest.raises(CheckpointError) as error:
            engine.finish_saves()
        return str(error.value)
    threading.Timer(20.0, os.kill, (pids[1], signal.SIGCONT)).start()
    began = time.monotonic()
    if waits == "SIGTERM":
        if os.fork() == 0:  # who sees that it ends in time
            time.sleep(15)
            Path(folder, "in time").write_text(str(not Path(f"/proc/{pids[0]}/fd/0").exists()))
            os.kill(pids[1], signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGTERM)
    end_saves()
    assert time.monotonic() - began < 15
    os.kill(pids[1], signal.SIGCONT)
    with pytest.raises(CheckpointError) as error:
        engine.finish_saves()
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["the end", "SIGTERM"])
def test_a_rank_that_was_stopped_holds_up_no_end(waits: str, tmp_path: Path) -> None:
    ended = try_ranks((is_stopped, (str(tmp_path), waits), {}), 2, timeout=60)
    assert not ended.hang
    if waits == "the end":
        assert all("rank(s) [1] have not written their files" in text for text in ended.outcomes), ended.outcomes
    else:
        assert ended.outcomes[0].kind == "Died" and (tmp_path / "in time").read_text() == "True"
        assert "was not saved" in ended.logs  # rank 1's line; its process may find the other one gone
    assert not manifest_path(tmp_path / "last").exists()


def test_every_point_of_a_save_is_there() -> None:
    assert len(POINTS) >= 12
    assert all(callable(getattr(place, name)) for place, name in POINTS.values())


class LooksAtCheckpoints(transformers.TrainerCallback):
    """Notes after each save which checkpoints are there, and which of them are complete."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[str], list[str]]] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folders = sorted(Path(args.output_dir).glob("checkpoint-*"))
        complete = [folder.name for folder in folders if why_torn(folder) is None]
        self.seen.append(([folder.name for folder in folders], complete))


def train_in_background(folder: str, in_background: bool) -> dict[str, Any]:
    config = {**zero_config(3), "checkpoint": {"async": in_background}}
    more = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "gradient_accumulation_steps": 1}
    args = hf_zero.TrainingArguments(**arguments(folder, **more), zero=config)
    looks = LooksAtCheckpoints()
    if in_background:
        slow_down("a rank file begins", 0.05)
    trainer = hf_zero.Trainer(model=build(), args=args, train_dataset=examples(40, 1), callbacks=[looks])
    trainer.train()
    left = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    again = hf_zero.TrainingArguments(**arguments(folder, **{**more, "max_steps": 7}), zero=config)
    trainer = hf_zero.Trainer(model=build(), args=again, train_dataset=examples(40, 1))
    trainer.train(resume_from_checkpoint=True)
    losses += [one["loss"] for one in trainer.state.log_history if "loss" in one][len(losses) :]
    return {"seen": looks.seen, "left": left, "losses": losses, "limit": args.save_total_limit}


@pytest.mark.slow
def test_trainer_keeps_the_last_published_checkpoint(tmp_path: Path) -> None:
    plain = run_ranks(train_in_background, 2, str(tmp_path / "plain"), False)[0]
    found = run_ranks(train_in_background, 2, str(tmp_path / "async"), True)[0]
    assert found["losses"] == plain["losses"] and len(plain["losses"]) == 7
    assert found["left"] == plain["left"] == ["checkpoint-5"]
    assert found["limit"] == 1
    for number, (there, complete) in enumerate(found["seen"], 1):
        assert f"checkpoint-{number}" in there
        assert complete or number == 1, found["seen"]  # the one before stays until this one is published
        assert len(there) <= 2
    assert any(f"checkpoint-{n}" not in complete for n, (_, complete) in enumerate(found["seen"], 1))
