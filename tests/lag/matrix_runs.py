"""Short trainings of a tiny Llama that use hf_zero's features one after another, on the CPU or the lag device.

Each returns what another device must give too, bit for bit. Losses stay on the device until the end: a host that
reads them in every step waits for the device, and a wait that is missing elsewhere does not show.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.hf.trainer.out_of_memory import run_attempt
from tests.lag import device, group

VOCABULARY, LENGTH = 23, 6
MICRO_BATCHES = 2  # of a step, where gradients are accumulated
Outcome = dict[str, Any]


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        initializer_range=0.3,
        attn_implementation="eager",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


# ---------------------------------------------------------------- stages and media
def zero_of(stage: int, medium: str, folder: str) -> dict[str, Any]:
    """The block zero_optimization: where optimizer states live and, at stage 3, parameters."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 20}
    if medium == "none":
        return zero
    block = {"device": "nvme" if medium == "nvme" else "cpu", "nvme_path": f"{folder}/nvme", "pin_memory": True}
    zero["offload_optimizer"] = {**block, "delayed_update": medium == "delayed"}
    if stage == 3:
        zero["offload_param"] = {**block, "max_in_cpu": 0}
    return zero


def start(
    model: nn.Module, zero: dict[str, Any], *, accumulation: int = 1, clip: float = 0.0, **more: Any
) -> hf_zero.ZeroEngine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "zero_optimization": zero,
        **more,
    }
    return hf_zero.initialize(model=model, config=config)[0]


# ---------------------------------------------------------------- steps and what is compared
class Training:
    """Steps of one engine, on the same batches wherever it runs."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.losses: list[torch.Tensor] = []
        self.norms: list[float | None] = []

    def step(self, number: int, batch_size: int = 2) -> None:
        for micro in range(self.engine.accumulation_steps):
            ids = batch(number, micro, batch_size).to(self.engine.device)
            loss = self.engine(input_ids=ids, labels=ids).loss
            self.engine.backward(loss)
            self.engine.step()
            self.losses.append(loss.detach())
        self.norms.append(self.engine.get_global_grad_norm())

    def outcome(self, **more: Any) -> Outcome:
        weights = self.engine.full_state_dict(keep=True)
        losses = [loss.item() for loss in self.losses]
        return {"losses": losses, "norms": self.norms, "weights": digest(weights), **more}


def batch(number: int, micro: int, batch_size: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * number + 10 * micro + rank)
    return torch.randint(3, VOCABULARY, (batch_size, LENGTH), generator=generator)


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    text = hashlib.sha256()
    for name in sorted(tensors):
        text.update(name.encode() + tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()[:16]


# ---------------------------------------------------------------- programs
def averages_and_edits(zero: dict[str, Any], folder: str) -> Outcome:
    """Accumulation, clipping, reentrant recomputing; ShardedEMA; gathered_params(write_rank)."""
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    training = Training(start(model, zero, accumulation=MICRO_BATCHES, clip=0.5))
    average = hf_zero.ShardedEMA(model, 0.5)
    training.step(0)
    average.update()
    with hf_zero.gathered_params(model, write_rank=0), torch.no_grad():
        if training.engine.rank == 0:
            model.lm_head.weight.mul_(0.5)
            model.model.layers[1].mlp.up_proj.weight[0, 0] = 3.0
    training.step(1)
    average.update()
    with average.swapped(), torch.no_grad():
        ids = batch(9, 0, 2).to(training.engine.device)
        training.losses.append(training.engine(input_ids=ids, labels=ids).loss)
    training.step(2)
    seen = training.outcome(average=digest(average.full_state_dict(keep=True)))
    average.close()
    training.engine.teardown()
    return seen


def adapters_and_texts(zero: dict[str, Any], folder: str) -> Outcome:
    """LoRA, recomputing without reentrance, generate in both ways between steps, copy_weights to two other models."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model: Any = get_peft_model(llama(), lora)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    training = Training(start(model, zero))
    engine, texts = training.engine, []
    plain: Any = get_peft_model(llama(1), lora).to(engine.device)
    copy: Any = get_peft_model(llama(1), lora)
    hf_zero.shard(copy, {"zero_optimization": zero})
    for number, way in enumerate(["once", "stream"]):
        training.step(number)
        engine.config = dataclasses.replace(engine.config, gather_for_generation=way)
        model.eval()
        text = model.generate(input_ids=batch(5, 0, 2).to(engine.device), max_new_tokens=4, do_sample=False)
        texts.append(text.tolist())
        model.train()
        hf_zero.copy_weights(model, plain, tau=0.5)
        hf_zero.copy_weights(model, copy)
    training.step(2)
    copied = hf_zero.engine_of(copy)
    assert copied is not None
    more = {"texts": texts, "plain": digest(plain.state_dict()), "copy": digest(copied.full_state_dict(keep=True))}
    seen = training.outcome(**more)
    copied.teardown()
    engine.teardown()
    return seen


def saved_and_resumed(zero: dict[str, Any], folder: str) -> Outcome:
    """A checkpoint between steps; another engine goes on from it, as the first one does."""
    training = Training(start(llama(), zero, accumulation=MICRO_BATCHES))
    for number in range(2):
        training.step(number)
    training.engine.save_checkpoint(f"{folder}/saved")
    training.step(2)
    seen = training.outcome()
    training.engine.teardown()
    again = resumed(zero, folder)
    assert again["losses"] == seen["losses"][-MICRO_BATCHES:], "the resume is exact"
    assert again["weights"] == seen["weights"], "the resume is exact"
    return seen


def resumed(zero: dict[str, Any], folder: str) -> Outcome:
    """The step that follows `saved_and_resumed`'s checkpoint, at this world size."""
    training = Training(start(llama(1), zero, accumulation=MICRO_BATCHES))
    assert training.engine.load_checkpoint(f"{folder}/saved")[0] is not None
    training.step(2)
    seen = training.outcome()
    training.engine.teardown()
    return seen


def out_of_memory(zero: dict[str, Any], folder: str) -> Outcome:
    """Memory ends on rank 1, in a forward and in a backward; all ranks begin the step again with half the batch."""
    model = llama()
    training = Training(start(model, zero))
    training.step(0, 4)
    tries = 0
    for number, place in enumerate(["forward", "backward"], start=1):
        if training.engine.device.type != "cpu":
            tries += fill_up(training, number, place, model.model.layers[1])
            device.set_schedule(device.schedule())  # the ranks have drawn unequally many coins
        training.step(number, 2)
    seen = training.outcome()
    assert tries == (0 if training.engine.device.type == "cpu" else 2)
    training.engine.teardown()
    return seen


def fill_up(training: Training, number: int, place: str, layer: nn.Module) -> bool:
    """Make a step for which memory ends on rank 1, as Trainer with auto_find_batch_size does. All ranks recover."""
    engine = training.engine

    def full(*_: Any) -> None:
        if engine.rank == 1 or engine.world_size == 1:
            device.set_memory_limit(torch.accelerator.memory_allocated() + 64)

    def of_backward(_: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            (args[0] if args else kwargs["hidden_states"]).register_hook(full)

    on_forward = full if place == "forward" else of_backward
    handle = layer.register_forward_pre_hook(on_forward, with_kwargs=place == "backward")
    arguments = SimpleNamespace(auto_find_batch_size=True, process_index=engine.rank, n_gpu=1)
    trainer = SimpleNamespace(args=arguments, model=engine.module, accelerator=None)
    plugin: Any = SimpleNamespace(take_batch_size=lambda size: None, resolve=lambda *_: engine.config)
    made = len(training.losses)
    try:
        run_attempt(trainer, plugin, lambda size: training.step(number, size), 4)
    except RuntimeError as error:
        assert "out of memory." in str(error), error
        del training.losses[made:]
        return True
    finally:
        device.set_memory_limit(0)
        handle.remove()
    return False


PROGRAMS: dict[str, Callable[[dict[str, Any], str], Outcome]] = {
    program.__name__: program for program in (averages_and_edits, adapters_and_texts, saved_and_resumed, out_of_memory)
}


# ---------------------------------------------------------------- on the devices
def on_cpu(program: Callable[[dict[str, Any], str], Outcome], stage: int, medium: str, folder: str) -> Outcome:
    return program(zero_of(stage, medium, folder), folder)


def on_lag(
    program: Callable[[dict[str, Any], str], Outcome], stage: int, medium: str, folder: str, schedules: list[str]
) -> list[Outcome]:
    """One after the other, each in a folder of its own."""
    device.enable()
    group.register()
    outcomes = []
    for schedule in schedules:
        device.set_schedule(schedule)
        mine = str(Path(folder, schedule.replace(":", "")))
        os.makedirs(mine, exist_ok=True)
        outcomes.append(program(zero_of(stage, medium, mine), mine))
        torch.accelerator.synchronize()
        assert device.take_reports() == [], schedule
    return outcomes
