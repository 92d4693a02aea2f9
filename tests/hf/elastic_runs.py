"""A Trainer that resumes by itself, under an agent of torchrun: `python -m tests.hf.elastic_runs FOLDER STEP WHAT`.

In the first attempt the last rank is killed after step STEP; with "host" for WHAT, instead of "rank", its agent is
killed with it. Rank 0 leaves what the run came to in outcome.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import transformers

import hf_zero
from tests.hf import runs


class _Killer(transformers.TrainerCallback):
    """Kills the last rank, in the first attempt."""

    def __init__(self, step: int, what: str) -> None:
        self._step, self._what = step, what

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_last = args.process_index == args.world_size - 1
        if is_last and state.global_step == self._step and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            if self._what == "host":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, kill_after: int, what: str = "rank", *, resume: Any = None) -> dict[str, Any]:
    """Train six steps, with a checkpoint at every second one."""
    more = {"max_steps": 6, "save_steps": 2, "save_strategy": "steps", "resume_from_checkpoint": "auto"}
    args = hf_zero.TrainingArguments(**runs.arguments(folder, **more), zero=runs.zero_config(3))
    trainer = hf_zero.Trainer(
        model=runs.build(0.1), args=args, train_dataset=runs.examples(40, 1), callbacks=[_Killer(kill_after, what)]
    )
    trainer.train(resume_from_checkpoint=resume)
    result = runs.outcome(trainer, folder + "/final")
    first = next(entry for entry in trainer.state.log_history if "train_runtime" in entry)
    return {
        "losses": result.losses,
        "weights": runs.digest(result.weights),
        "world_size": args.world_size,
        "steps": first["step"],
    }


def main() -> None:
    folder, step, what = sys.argv[1:]
    outcome = train(folder, int(step), what)
    if os.environ["RANK"] == "0":
        Path(folder, "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
