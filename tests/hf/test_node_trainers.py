"""Trainer with save_on_each_node: two nodes with folders of their own, and two that share one after all."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_zero
from hf_zero import CheckpointError
from hf_zero.errors import ConfigError
from hf_zero.hf.trainer import trainer as hf_trainer
from tests.harness.ranks import run_ranks
from tests.hf.runs import arguments, build, examples, zero_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/cwd")

LOCAL = "/proc/self/cwd/out"  # the same path on every node, with other content
SAVES = int(os.environ.get("NODE_TRAINER_SAVES", "2"))  # 20 were run by hand
LAST = SAVES + 2
SMALL = ["scheduler.pt", "trainer_state.json", "training_args.bin", "model.safetensors", "zero/manifest.json"]


class SavesEnd(transformers.TrainerCallback):
    """No save after step SAVES."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save and state.global_step <= SAVES


def trainer_on(root: str, folder: str, nodes: list[int], stage: int, in_background: bool = False) -> Any:
    rank = int(os.environ["RANK"])
    home = Path(root, f"node{nodes[rank]}")
    home.mkdir(exist_ok=True)
    os.chdir(home)
    os.environ.update(LOCAL_RANK=str(nodes[:rank].count(nodes[rank])), LOCAL_WORLD_SIZE=str(nodes.count(nodes[rank])))
    given = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "save_on_each_node": True}
    given |= {"max_steps": LAST, "per_device_train_batch_size": 4 // len(nodes), "lr_scheduler_type": "constant"}
    config = zero_config(stage) | {"checkpoint": {"async": in_background}}
    args = hf_zero.TrainingArguments(**arguments(folder, **given), zero=config)
    return hf_zero.Trainer(model=build(), args=args, train_dataset=examples(40, 1), callbacks=[SavesEnd()])


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def save(root: str, folder: str, stage: int, in_background: bool = False) -> tuple[list[float], int]:
    """4 ranks, 2 a node: losses, and how often this rank rotated."""
    trainer = trainer_on(root, folder, [0, 0, 1, 1], stage, in_background)
    rotations = []
    plain = hf_trainer.delete_older
    hf_trainer.delete_older = lambda *args, **kwargs: (rotations.append(1), plain(*args, **kwargs))
    trainer.train()
    return losses_of(trainer), len(rotations)


def resume(root: str, stage: int, nodes: list[int], asked: Any) -> list[float]:
    trainer = trainer_on(root, LOCAL, nodes, stage)
    trainer.train(resume_from_checkpoint=asked)
    return losses_of(trainer)


def refused(root: str, stage: int) -> None:
    for asked, match in (
        (True, "together hold no complete"),
        ("auto", "together hold no complete"),
        (f"{LOCAL}/checkpoint-{SAVES}", "no node of this run has"),
    ):
        trainer = trainer_on(root, LOCAL, [0, 0], stage)
        with pytest.raises(CheckpointError, match=match):
            trainer.train(resume_from_checkpoint=asked)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("in_background", [False, True])
def test_trainers_of_two_nodes_go_on_from_their_folders(in_background: bool, tmp_path: Path) -> None:
    root, stage = str(tmp_path), 3
    outcomes = run_ranks(save, 4, root, LOCAL, stage, in_background)
    assert [count for _, count in outcomes] == [SAVES, 0, SAVES, 0], "each node rotates its own"
    losses = outcomes[0][0]
    for node in (0, 1):
        found = files(tmp_path / f"node{node}" / "out")
        assert {name.partition("/")[0] for name in found} == {f"checkpoint-{SAVES}"}, found
        here = {name.partition("/")[2] for name in found}
        ranks = (2 * node, 2 * node + 1)
        own = {f"zero/rank-{rank:05d}.safetensors" for rank in ranks} | {f"rng_state_{rank}.pth" for rank in ranks}
        assert here >= {*SMALL, *own}, here
        assert {name for name in here if "rank-" in name or "rng" in name} == own, here
    if not in_background:
        run_ranks(refused, 2, root, stage)  # without a node
    for number, nodes in enumerate([[0, 1]] if in_background else [[0, 1], [0, 2, 1, 1]]):
        copy = tmp_path / f"resumed{number}"
        shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("resumed*"))
        found_losses = run_ranks(resume, len(nodes), str(copy), stage, nodes, "auto" if number else True)[0]
        assert found_losses == pytest.approx(losses, rel=0, abs=1e-5), nodes


def test_nodes_that_share_a_folder_do_not_race(tmp_path: Path) -> None:
    outcomes = run_ranks(save, 4, str(tmp_path), f"{tmp_path}/shared", 1)
    assert [count for _, count in outcomes] == [SAVES, 0, 0, 0], "one process rotates"
    found = files(tmp_path / "shared")
    assert {name.partition("/")[0] for name in found} == {f"checkpoint-{SAVES}"}, found
    here = {name.partition("/")[2] for name in found}
    assert here >= {*SMALL, *(f"zero/rank-{rank:05d}.safetensors" for rank in range(4))}


def test_the_key_alone_would_leave_a_node_without_the_small_files(tmp_path: Path) -> None:
    config = {**zero_config(1), "checkpoint": {"use_node_local_storage": True}}
    with pytest.raises(ConfigError, match="is true, but save_on_each_node is not"):
        hf_zero.TrainingArguments(**arguments(str(tmp_path)), zero=config)
