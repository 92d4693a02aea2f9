"""Two ranks, one of which cannot write: `python -m tests.checkpoint.failed_saves KIND FOLDER`.

A save is made to fail at its first write, at its second, and so on until none is left; over a good checkpoint, and
into a new place. After each the folder is as it was, to the byte, unless the save was committed already: then it holds
the new checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.errors import CheckpointError
from tests.harness.refused_writes import refused_from
from tests.hf import runs

KINDS = ("0", "1", "2", "3", "3 async", "pipeline", "pipeline async", "trainer", "trainer async")
Save = Callable[[str], None]


class Saver:
    """A Saver is what saves; `tag` is "over" for the checkpoint that is there, else a new place."""

    def __init__(self, kind: str, folder: str) -> None:
        self.folder = folder
        self.checkpoint = {"async": True} if kind.endswith("async") else {}
        self.is_pipeline = kind.startswith("pipeline")
        (self._start_trainer if kind.startswith("trainer") else self._start_engine)(kind)

    def _start_engine(self, kind: str) -> None:
        first = self._engine(kind, 2)
        self._train(first)
        first.save_checkpoint(self.folder, "over")
        first.finish_saves()
        first.teardown()
        self.engine = self._engine(kind, 4)  # so that a pipeline's config.json differs
        self._train(self.engine)
        self.save = lambda tag: self.engine.save_checkpoint(self.folder, tag)

    def _engine(self, kind: str, layers: int) -> Any:
        torch.manual_seed(layers)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2 if self.is_pipeline else 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": 0 if self.is_pipeline else int(kind[0]),
                "stage3_param_persistence_threshold": 0,
            },
            "checkpoint": self.checkpoint,
        }
        model: Any = nn.Sequential(*[nn.Linear(7, 7) for _ in range(layers)])
        if self.is_pipeline:
            config["pipeline"] = {"stages": 2}
            config_of_model = runs.build().config
            config_of_model.num_hidden_layers = layers
            model = hf_zero.pipeline.from_transformers(type(runs.build())(config_of_model))
        return hf_zero.initialize(model=model, config=config)[0]

    def _train(self, engine: Any) -> None:
        if self.is_pipeline:
            row = torch.arange(12)[None] % runs.VOCAB
            engine.train_batch(iter([(row, row)] * 2))
            return
        loss = engine(torch.ones(1, 7)).square().mean()
        engine.backward(loss)
        engine.step()

    def _start_trainer(self, kind: str) -> None:
        arguments = runs.arguments(self.folder, max_steps=2, save_strategy="no")
        zero = runs.zero_config(3, checkpoint=self.checkpoint)
        args = hf_zero.TrainingArguments(**arguments, zero=zero)
        trainer = hf_zero.Trainer(model=runs.build(), args=args, train_dataset=runs.examples(40, 1))
        trainer.train()
        self.engine = trainer.zero
        args.save_total_limit = 1  # the one that is there must stay

        def save(tag: str) -> None:
            trainer.state.global_step = {"over": 1}.get(tag, 7)
            trainer._save_checkpoint(trainer.model, trial=None)

        self.save = save
        save("over")
        self.engine.finish_saves()
        with hf_zero.gathered_params(trainer.model, write_rank=0), torch.no_grad():
            for param in trainer.model.parameters():
                param += 1.0

    def try_to_save(self, tag: str) -> str:
        """Return what went wrong; nothing if the save is complete."""
        problems = []
        for attempt in (lambda: self.save(tag), self.engine.finish_saves):
            try:
                attempt()
            except CheckpointError as error:
                problems.append(str(error))
        return "; ".join(problems)


def content(folder: str) -> dict[str, str]:
    """Path -> digest, of all files; empty folders count too."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def is_complete(folder: Path) -> bool:
    try:
        with open_checkpoint(folder) as reader:
            reader.verify()
    except CheckpointError:
        return False
    return not [path for path in folder.rglob("*") if ".partial" in path.name or ".replaced" in path.name]


def campaign(saver: Saver, tag: str, victim: int) -> dict[str, Any]:
    """Refuse each step of a save on one rank; what became of the folder."""
    root, rank = saver.folder, dist.get_rank()
    found: dict[str, Any] = {"as before": 0, "new": 0, "wrong": []}
    before, backup = content(root), f"{root}.before"
    if rank == 0:
        shutil.copytree(root, backup)
    dist.barrier()
    place = Path(root) / ({"over": "checkpoint-1"}.get(tag, "checkpoint-7") if "checkpoint-1" in before else tag)
    for step in range(10_000):
        with refused_from(step if rank == victim else -1, root) as refused:
            problem = saver.try_to_save(tag)
        counts = [None, None]
        dist.all_gather_object(counts, (refused.count, problem))
        after, complete = content(root), is_complete(place)
        dist.barrier()
        done = not counts[victim][0]
        if done:
            assert not problem, problem
            assert after != before, "vacuous: nothing stopped the save, and it changed nothing"
            assert complete, [*after]
        elif after == before:
            found["as before"] += 1
        elif complete:
            found["new"] += 1
        else:
            changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            found["wrong"].append((step, changed[:6], [text for _, text in counts]))
        if rank == 0 and after != before:  # for the next step
            shutil.rmtree(root)
            shutil.copytree(backup, root)
        dist.barrier()
        if done:
            break
    if rank == 0:
        shutil.rmtree(backup)
    return {**found, "steps": step}


def main() -> None:
    kind, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    began = time.monotonic()
    saver = Saver(kind, folder)
    found = {}
    for tag in ("over", "new"):
        for victim in (1, 0):
            found[f"{tag}, rank {victim}"] = campaign(saver, tag, victim)
    if dist.get_rank() == 0:
        print(json.dumps({**found, "seconds": time.monotonic() - began}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
