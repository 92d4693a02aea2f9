"""Training runs in which one rank runs out of memory, at a chosen place, as long as its batch is too large."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import hf_zero
from hf_zero.engine.engine import engine_of
from tests.hf import runs

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Limits:
    """Raises the error of a full device on one rank: from the given micro-batch on, where the batch is too large.

    `late`: the rank that comes to that place a second after the others.
    """

    def __init__(
        self, model: nn.Module, where: str, fits: int, since: int, guilty: tuple[int, ...], late: int | None
    ) -> None:
        self.where, self.fits, self.since, self.guilty, self.late = where, fits, since, guilty, late
        self.batches: list[int] = []
        self.raised = 0
        model.register_forward_pre_hook(self._starts, with_kwargs=True)
        layer = model.model.layers[1]
        layer.register_forward_pre_hook(self._in_layer, with_kwargs=True)

    def _starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.batches.append(len(kwargs["input_ids"]))

    def _full(self, where: str) -> bool:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        here = where == self.where and torch.is_grad_enabled()
        if not here or self.batches[-1] <= self.fits or len(self.batches) <= self.since:
            return False
        if rank == self.late:
            time.sleep(1.0)
        return rank in self.guilty

    def _fail(self) -> None:
        self.raised += 1
        raise torch.OutOfMemoryError(TEXT)

    def _in_layer(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._full("forward"):
            self._fail()
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(self._in_backward)

    def _in_backward(self, grad: torch.Tensor) -> None:
        with torch.enable_grad():
            full = self._full("backward")
        if full:
            self._fail()


def in_order(trainer_class: type) -> type:
    """Data in its own order, so that what a broken attempt drew does not matter."""

    class InOrder(trainer_class):  # type: ignore[misc,valid-type]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(train_dataset or self.train_dataset)

    return InOrder


def find_batch(
    zero: dict[str, Any] | None, folder: str, *, start: int, where: str = "forward", since: int = 0, **more: Any
) -> dict[str, Any]:
    """Train with auto_find_batch_size from `start` samples; more than 6 do not fit on the guilty ranks."""
    guilty = more.pop("guilty", (1,))
    fits = more.pop("fits", 6)
    late = more.pop("late", None)
    args_class, trainer_class, extra = transformers.TrainingArguments, transformers.Trainer, {}
    if zero is not None:
        args_class, trainer_class, extra = hf_zero.TrainingArguments, hf_zero.Trainer, {"zero": zero}
    named = runs.arguments(folder, max_steps=4, per_device_train_batch_size=start, auto_find_batch_size=True)
    named |= {"gradient_accumulation_steps": 1, **more}
    model = runs.build()
    limits = Limits(model, where, fits, since, guilty, late)
    args = args_class(**named, **extra)
    trainer = in_order(trainer_class)(model=model, args=args, train_dataset=runs.examples(64, 1))
    before = {name: value.clone() for name, value in runs.build().state_dict().items()}
    trainer.train()
    done = runs.outcome(trainer, str(Path(folder) / "final"))
    engine = engine_of(trainer.model)
    moved = max((done.weights[name] - before[name]).abs().max().item() for name in done.weights)
    return {
        "losses": done.losses,
        "weights": done.weights,
        "moved": moved,
        "batches": limits.batches,
        "raised": limits.raised,
        "micro": engine.config.train_micro_batch_size_per_gpu if engine is not None else None,
        "steps": trainer.state.global_step,
        "state_batch": trainer.state.train_batch_size,
        "memory": engine.memory_report() if engine is not None else {},
    }


def found_and_plain(zero: dict[str, Any], folder: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run that finds its batch, from eight, and one that starts with what fits."""
    found = find_batch(zero, folder + "/found", start=8, **more)
    return found, find_batch(zero, folder + "/plain", start=6, **more)


def fail_for_good(zero: dict[str, Any], folder: str, auto_find: bool, fits: int, where: str = "forward") -> None:
    """No batch fits, or none is looked for."""
    find_batch(zero, folder, start=3, fits=fits, auto_find_batch_size=auto_find, where=where)


def fail_in_the_update(zero: dict[str, Any], folder: str) -> None:
    """The optimizer has no memory for its state on one rank."""

    class Greedy(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if torch.distributed.get_rank() == 1:
                raise torch.OutOfMemoryError(TEXT)
            return super().step(closure)

    zero = {**zero, "zero_allow_untested_optimizer": True}
    args = hf_zero.TrainingArguments(**runs.arguments(folder, auto_find_batch_size=True), zero=zero)
    model = runs.build()
    optimizer = Greedy(model.parameters(), lr=1e-3)
    trainer = hf_zero.Trainer(model=model, args=args, train_dataset=runs.examples(64, 1), optimizers=(optimizer, None))
    trainer.train()


def search(zero: dict[str, Any], folder: str) -> dict[str, Any]:
    """hyperparameter_search with optuna over a grid; what each trial trained with, and the best."""
    import optuna

    grid = {"learning_rate": [1e-4, 1e-2], "per_device_train_batch_size": [2, 3]}
    seen: list[dict[str, Any]] = []

    class Noted(in_order(hf_zero.Trainer)):  # type: ignore[misc]
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            metrics = super().evaluate(*args, **kwargs)
            engine = engine_of(self.model)
            assert engine is not None and engine.optimizer is not None
            losses = [row["loss"] for row in self.state.log_history if "loss" in row]
            seen.append(
                {
                    "micro": engine.config.train_micro_batch_size_per_gpu,
                    "lr": engine.optimizer.param_groups[0]["initial_lr"],
                    "argument": self.args.learning_rate,
                    "losses": losses,
                    "eval": metrics["eval_loss"],
                    "live": len(_live()),
                }
            )
            return metrics

    named = runs.arguments(folder, gradient_accumulation_steps=1, eval_strategy="steps", eval_steps=4, max_steps=4)
    trainer = Noted(
        model_init=lambda trial=None: runs.build(),
        args=hf_zero.TrainingArguments(**named, zero=zero),
        train_dataset=runs.examples(40, 1),
        eval_dataset=runs.examples(8, 2),
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {name: trial.suggest_categorical(name, values) for name, values in grid.items()},
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=4,
        direction="minimize",
        backend="optuna",
        sampler=optuna.samplers.GridSampler(grid, seed=0),
    )
    return {"trials": seen, "best": (best.objective, best.hyperparameters) if best is not None else None}


def _live() -> list[Any]:
    import gc

    from hf_zero.engine.engine import live_engines

    gc.collect()
    return live_engines()
