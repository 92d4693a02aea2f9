"""Trainings under a scheduler block, by Trainer and by dummies of accelerate, each beside one without.

A function here runs on every rank (tests.harness.ranks). `curve` is the formula that the references follow.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import hf_zero
from hf_zero.errors import ConfigError
from tests.hf import runs
from tests.hf.runs import Outcome, arguments, build, examples, outcome, zero_config

PEAK, WARMUP, TOTAL = 1e-2, 3, 10
AUTO_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
AUTO_SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}

FIXED = {
    "type": "WarmupDecayLR",
    "params": {"warmup_max_lr": PEAK, "warmup_num_steps": WARMUP, "total_num_steps": TOTAL},
}
CONTRADICTIONS = (
    (FIXED, False),
    ({"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}}, False),
    ({"type": "WarmupLR"}, True),
)


def curve(step: int) -> float:
    """Return what step number `step` uses: WarmupDecayLR with a logarithmic warm-up, whose iterations come one step
    late.
    """
    i = step - 1
    if i < 0:
        return 0.0
    return PEAK * (math.log(i + 1) / math.log(WARMUP) if i < WARMUP else max(0.0, (TOTAL - i) / (TOTAL - WARMUP)))


def by_hand(optimizer: torch.optim.Optimizer) -> Any:
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)
        group["lr"] = 1.0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, curve)


# -------------------------------------------------------------------- Trainer
def trainer(kind: str, stage: int, folder: str, blocks: dict[str, Any], resume: str | None = None) -> Any:
    """(outcome, logged rates) of two epochs of five steps; "ddp" follows the curve with a scheduler of its own."""
    settings = arguments(folder, max_steps=-1, num_train_epochs=2, warmup_steps=WARMUP, learning_rate=PEAK)
    settings |= {"save_strategy": "steps", "save_steps": 4} if kind != "ddp" else {}
    model = build()
    more: dict[str, Any] = {}
    if kind == "ddp":
        args: Any = TrainingArguments(**settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=settings["adam_epsilon"], weight_decay=0.0)
        more = {"optimizers": (optimizer, by_hand(optimizer))}
    else:
        args = hf_zero.TrainingArguments(**settings, zero=zero_config(stage, **blocks))
    made = (Trainer if kind == "ddp" else hf_zero.Trainer)(
        model=model, args=args, train_dataset=examples(40, 1), eval_dataset=examples(9, 2), **more
    )
    made.train(resume_from_checkpoint=resume)
    made.evaluate()
    rates = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    if kind != "ddp":
        assert type(made.lr_scheduler).__name__ == "WarmupDecayLR", made.lr_scheduler
    return outcome(made, folder + "/final"), rates


def enabled_twice(stage: int, folder: str) -> list[float]:
    """An unmodified Trainer under `enable`, trained twice: the second training starts the curve anew."""
    hf_zero.enable(zero_config(stage, scheduler=AUTO_SCHEDULER))
    try:
        args = TrainingArguments(**arguments(folder, max_steps=TOTAL, warmup_steps=WARMUP, learning_rate=PEAK))
        made = Trainer(model=build(), args=args, train_dataset=examples(40, 1))
        made.train()
        first = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
        made.train()
        second = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
        assert second[-TOTAL:] == first
        return first
    finally:
        hf_zero.disable()


def refused(folder: str) -> list[str]:
    """Return what Trainer says of blocks that contradict it, or that another Trainer passes over."""
    said = []
    for scheduler, client in CONTRADICTIONS:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        more = {"optimizers": (optimizer, by_hand(optimizer))} if client else {}
        settings = arguments(folder, max_steps=-1, num_train_epochs=1, learning_rate=PEAK)  # two steps
        try:
            args = hf_zero.TrainingArguments(**settings, zero=zero_config(1, scheduler=scheduler))
            hf_zero.Trainer(model=model, args=args, train_dataset=examples(8, 1), **more).train()
        except ConfigError as error:
            said.append(str(error))
    return said


class OwnScheduler(hf_zero.Trainer):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer or self.optimizer)
        return self.lr_scheduler


def passed_over(folder: str) -> list[str]:
    """Return the warnings of a Trainer that makes its scheduler itself."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    args = hf_zero.TrainingArguments(**arguments(folder, max_steps=1), zero=zero_config(1, scheduler=AUTO_SCHEDULER))
    OwnScheduler(model=build(), args=args, train_dataset=examples(8, 1)).train()
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


# -------------------------------------------------------------------- accelerate
def fresh(stage: int, blocks: dict[str, Any], accumulation: int = 2, **more: Any) -> Accelerator:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, **more)
    if stage >= 0:
        hf_zero.ZeroPlugin(zero_config(stage, **blocks)).attach(accelerator)
    return accelerator


BLOCKS: dict[str, dict[str, Any]] = {
    "blocks": {"optimizer": AUTO_OPTIMIZER, "scheduler": AUTO_SCHEDULER},
    "own optimizer": {"scheduler": AUTO_SCHEDULER},
    "no blocks": {},
    "no scheduler": {"optimizer": AUTO_OPTIMIZER, "scheduler": FIXED},
}


def make(way: str, model: Any, processes: int) -> tuple[Any, Any]:
    """Return what a script makes: an optimizer, or a dummy of one, and the same of a scheduler or None."""
    length = {"total_num_steps": TOTAL * processes, "warmup_num_steps": WARMUP}  # as counted before `prepare`
    if way == "reference":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01)
        return optimizer, None
    if way == "own optimizer":
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.01)
        return optimizer, DummyScheduler(optimizer, **length)
    optimizer = DummyOptim(model.parameters(), lr=PEAK, weight_decay=0.01)
    if way == "no scheduler":
        return optimizer, None
    return optimizer, DummyScheduler(optimizer, **length, lr_scheduler_callable=None if way == "blocks" else by_hand)


def loop(way: str, stage: int, folder: str) -> Outcome:
    """An accelerate script of 10 steps with its state saved and loaded in between; `norms` are the rates used."""
    accelerator = fresh(stage, BLOCKS.get(way, {}))
    model = build()
    optimizer, scheduler = make(way, model, accelerator.num_processes)
    data = [{key: torch.tensor(value) for key, value in row.items()} for row in examples(80, 1)]
    loader = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    if scheduler is None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses: list[float] = []
    rates: list[float] = []
    for batch in loader:
        step = len(losses) // 2
        if way == "reference":
            optimizer.param_groups[0]["lr"] = curve(step)
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if len(losses) == 8 and way != "reference":
            jolt(accelerator, optimizer, scheduler, folder)
    weights = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    return Outcome(losses, rates, [], weights)


def jolt(accelerator: Any, optimizer: Any, scheduler: Any, folder: str) -> None:
    """Save, go three steps on along the curve, and load."""
    accelerator.save_state(folder)
    before = optimizer.param_groups[0]["lr"]
    stepped = scheduler or optimizer.schedule
    for _ in range(3):
        stepped.scheduler.step()
    assert optimizer.param_groups[0]["lr"] != before
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    assert optimizer.param_groups[0]["lr"] == before


def prepared_apart() -> list[float]:
    """The scheduler in a call of its own, after the optimizer: it takes over what the optimizer would step itself."""
    accelerator = fresh(1, {"scheduler": FIXED}, accumulation=1)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert optimizer.schedule is not None
    scheduler = accelerator.prepare(DummyScheduler(optimizer))
    return used(model, optimizer, scheduler)


def own_schedule(split: bool) -> list[float]:
    """A schedule of hf_zero.optim from the script goes one step per step, with any number of processes."""
    from accelerate.utils import DataLoaderConfiguration

    accelerator = fresh(1, {}, accumulation=1, dataloader_config=DataLoaderConfiguration(split_batches=split))
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    scheduler = hf_zero.optim.WarmupDecayLR(optimizer, **FIXED["params"])
    return used(*accelerator.prepare(model, optimizer, scheduler))


def counts() -> list[Any]:
    return [prepared_apart(), own_schedule(False), own_schedule(True), split_batches()]


def split_batches() -> int:
    """Return the counts of steps: where batches are split, a script's count of steps is the count of every process."""
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(split_batches=True)
    accelerator = fresh(1, BLOCKS["blocks"], accumulation=1, dataloader_config=config)
    model = build()
    optimizer = DummyOptim(model.parameters(), lr=PEAK)
    scheduler = accelerator.prepare(model, optimizer, DummyScheduler(optimizer, total_num_steps=21))[2]
    assert scheduler.scheduler.warmup_num_steps == 2, "0 steps of warm-up become 1, and 1 becomes 2"
    return int(scheduler.scheduler.total_num_steps)


def used(model: Any, optimizer: Any, scheduler: Any) -> list[float]:
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        model(input_ids=torch.arange(3, 9)[None], labels=torch.arange(3, 9)[None]).loss.backward()
        optimizer.step()
        scheduler.step()
    return rates


def misuse() -> dict[str, str]:
    """Each mistake and what is said of it."""
    said = {}
    for case in ("own scheduler", "no length", "nothing to build", "mixed", "parameters", "not prepared"):
        try:
            mistake(case)
        except ConfigError as error:
            said[case] = str(error)
    return said


def mistake(case: str) -> None:
    blocks = {"own scheduler": {"scheduler": FIXED}, "no length": {"scheduler": AUTO_SCHEDULER}}
    accelerator = fresh(1, blocks.get(case, {}))
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    dummy = DummyOptim(model.parameters(), lr=PEAK)
    step_lr = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    objects = {
        "own scheduler": (optimizer, step_lr),
        "no length": (optimizer, DummyScheduler(optimizer)),
        "nothing to build": (dummy, DummyScheduler(dummy)),
        "mixed": (dummy, step_lr),
        "parameters": (DummyOptim(model.parameters(), momentum=0.9),),
        "not prepared": (optimizer, DummyScheduler(dummy, lr_scheduler_callable=runs.build)),
    }[case]
    accelerator.prepare(model, *objects)
