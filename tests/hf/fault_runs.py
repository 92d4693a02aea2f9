"""One rank of a Trainer that fails in a given way at a given place, for scripts/fault_campaign.py."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_zero
from tests.harness import save_faults
from tests.hf import runs

PLACES = ("train", "save", "evaluate", "generate")
FAULTS = ("SIGTERM", "SIGKILL", "SIGSTOP", "exception", "out of memory")
STAGES = (0, 2, 3)
WORLD_SIZE, STEPS, STOPPED_S = 3, 6, 1.5
# The points of a save to which every rank comes, and those to which rank 0 does
_POINTS = (
    "the ranks agree",
    "what is saved is found",
    "a rank file begins",
    "tensors are written",
    "a file is synced",
)
_POINTS_OF_RANK_0 = (*_POINTS, "the manifest is written", "a file gets its name", "the manifest gets its name")


@dataclasses.dataclass(frozen=True)
class Case:
    """A case is what fails, where and when."""

    number: int
    fault: str
    place: str
    stage: int
    rank: int
    step: int
    call: int  # of the layer in that step, or of the point in that save
    point: str
    workers: int
    in_background: bool

    @classmethod
    def draw(cls, seed: int, number: int) -> Case:
        drawn = random.Random(f"{seed} {number}")
        place, fault = PLACES[number % len(PLACES)], FAULTS[number // len(PLACES) % len(FAULTS)]
        stage, rank, step = drawn.choice(STAGES), drawn.randrange(WORLD_SIZE), drawn.randint(1, STEPS)
        step += step % 2 if place in ("save", "evaluate") else 0  # those at which Trainer does it
        in_background = place != "save" and drawn.random() < 0.4
        rank = 0 if place == "save" and stage == 0 else rank  # which writes alone
        point, workers = drawn.choice(_POINTS if rank else _POINTS_OF_RANK_0), drawn.choice((0, 0, 1))
        call = 1 if place in ("save", "generate") else drawn.randint(1, 2)
        return cls(number, fault, place, stage, rank, step, call, point, workers, in_background)


class Faulty(transformers.TrainerCallback):
    """Fails once, where the case says."""

    def __init__(self, case: Case, mark: Path) -> None:
        self._case, self._mark = case, mark
        self._left, self._doing = case.call, "train"

    def watch(self, trainer: Any) -> None:
        trainer.model.model.layers[1].register_forward_pre_hook(lambda *_: self._pass(trainer))

    def _pass(self, trainer: Any) -> None:
        doing = "evaluate" if not trainer.model.training and self._doing == "train" else self._doing
        at = trainer.state.global_step + (doing == "train")
        if doing == self._case.place and at == self._case.step and self._mark.parent.exists():
            self._left -= 1
            if self._left == 0:
                self._strike()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._doing = "generate"
        model.eval()
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
        model.train()
        self._doing = "train"
        if self._case.place == "save" and state.global_step == self._case.step:
            save_faults.at(self._case.point, self._strike, call=self._case.call)

    def _strike(self) -> None:
        self._mark.touch()
        fault = self._case.fault
        if fault == "exception":
            raise ValueError("a mistake in the script of one rank")
        if fault == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if fault == "SIGSTOP":
            subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), getattr(signal, fault))


def train(case: Case | None, stage: int, folder: str) -> tuple[list[float], str]:
    """Train, evaluate, generate and save, from the newest whole checkpoint on; the losses and a digest of the weights.

    Args:
        case: The fault; None: nothing fails.
    """
    rank = os.environ["RANK"]
    (Path(folder) / "processes").mkdir(exist_ok=True)
    (Path(folder) / "processes" / str(os.getpid())).touch()
    more = {"max_steps": STEPS, "save_steps": 2, "save_strategy": "steps", "eval_steps": 2, "eval_strategy": "steps"}
    background = {"checkpoint": {"async": True}} if case is not None and case.in_background else {}
    args = hf_zero.TrainingArguments(
        **runs.arguments(folder + "/out", resume_from_checkpoint="auto", **more),
        dataloader_num_workers=0 if case is None else case.workers,
        zero=runs.zero_config(stage, **background),
    )
    fault = None if case is None or case.rank != int(rank) else case
    idle = Case(0, "", "", stage, 0, 0, 0, "", 0, False)
    faulty = Faulty(fault or idle, Path(folder) / "struck")
    trainer = hf_zero.Trainer(
        model=runs.build(0.1),
        args=args,
        train_dataset=runs.examples(48, 1),
        eval_dataset=runs.examples(9, 2),
        callbacks=[faulty],
    )
    faulty.watch(trainer)
    trainer.train()
    outcome = runs.outcome(trainer, folder + "/final")
    return outcome.losses + outcome.evals, runs.digest(outcome.weights)
