"""Shows the progress of a run of this recipe, and writes the summary.json of its output folder."""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SUMMARY = "summary.json"
LINES_WITHOUT_TERMINAL = 10  # progress lines per training when stderr is a file


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


class LossBar(TrainerCallback):
    """One progress bar with the loss in it; some plain lines instead where stderr is no terminal. Rank 0 only."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._evaluation_bar: tqdm[Any] | None = None
        self._every = 1  # steps per line without a terminal

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._every = max(1, state.max_steps // LINES_WITHOUT_TERMINAL)
        if state.is_world_process_zero and sys.stderr.isatty():
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs or not state.is_world_process_zero:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {logs['loss']:.4f}")
        elif state.global_step % self._every == 0:
            line = f"step {state.global_step:>4}/{state.max_steps}  loss {logs['loss']:.4f}"
            print(line, file=sys.stderr, flush=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not sys.stderr.isatty():
            return
        if self._evaluation_bar is None:
            self._evaluation_bar = tqdm(total=len(eval_dataloader), desc="evaluating", leave=False, dynamic_ncols=True)
        self._evaluation_bar.update(1)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._evaluation_bar is not None:
            self._evaluation_bar.close()
            self._evaluation_bar = None


class StepTimer(TrainerCallback):
    """Seconds of every optimizer step, from its first micro-batch to the end of the update."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self._started = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps_s.append(time.perf_counter() - self._started)

    @property
    def median_s(self) -> float:
        """The first step is left out where there are others: it allocates."""
        return statistics.median(self.steps_s[1:] or self.steps_s)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[-1])


def write_summary(
    trainer: Trainer, *, source: str, dataset: str, before: float | None, after: float | None, timer: StepTimer
) -> Path:
    """Write summary.json into the output folder. Rank 0 calls it, alone."""
    args, state = trainer.args, trainer.state
    output = Path(args.output_dir)
    summary = {
        "model": source,
        "dataset": dataset,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "layers": getattr(trainer.model.config, "num_hidden_layers", None),
        "zero": str(args.zero),
        "world_size": args.world_size,
        "device": str(args.device),
        "micro_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "learning_rate": args.learning_rate,
        "resumed_from": args.resume_from_checkpoint or None,
        "max_steps": state.max_steps,
        "steps": [entry for entry in state.log_history if "loss" in entry],
        "eval_loss_before": before,
        "eval_loss_after": after,
        "step_time_s": timer.median_s,
        "steps_run": len(timer.steps_s),
        "training_s": sum(timer.steps_s),
        "peak_memory_bytes_rank_0": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "checkpoints": [str(path) for path in sorted(output.glob("checkpoint-*"), key=_step_of)],
    }
    path = output / SUMMARY
    unfinished = path.with_suffix(".json.tmp")
    output.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return path
