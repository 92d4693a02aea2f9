"""The block under Trainer's gradient_checkpointing: regions are placed, and the losses are those without the block."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

import hf_zero
from hf_zero.extras.activations import active
from tests.harness.ranks import run_ranks

LAYERS = 3
ARENA = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": LAYERS}
CPU = {"offload_optimizer": {"device": "cpu"}}
# ZeRO's keys, use_reentrant, whether adapters train and the model generates after each step.
CASES = (
    ({"stage": 2, **CPU}, False, False),
    ({"stage": 3, "stage3_param_persistence_threshold": 0}, True, False),
    ({"stage": 3, "stage3_param_persistence_threshold": 0}, False, True),
)


class Watch(TrainerCallback):
    """The callback notes what was saved, and allocated for it, after each step; generates with adapters."""

    def __init__(self, *, generates: bool) -> None:
        self.generates = generates
        self.found: list[tuple[int, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (now := active.current()) is not None:
            memory = now.saved.memory
            assert now.saved.num_live == 0 and memory is not None
            self.found.append((memory.peak_bytes, memory.allocations))
        if self.generates:
            model = kwargs["model"].eval()
            model.generate(input_ids=torch.tensor([[3, 4]]), max_new_tokens=2, pad_token_id=0)
            model.train()


def losses(out: str, zero: dict[str, Any], block: dict[str, Any], reentrant: bool, adapters: bool) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1)
    model: Any = LlamaForCausalLM(config)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
        model.enable_input_require_grads()
    args = hf_zero.TrainingArguments(
        out,
        zero={"zero_optimization": zero, **block},
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=3,
        learning_rate=1e-2,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": reentrant},
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": torch.arange(8) + i % 3, "labels": torch.arange(8) + i % 3} for i in range(32)]
    watch = Watch(generates=adapters)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[watch])
    trainer.train()
    hf_zero.engine_of(trainer.model).teardown()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], watch.found


def train(out: str) -> list[Any]:
    blocks: tuple[dict[str, Any], ...] = ({"activation_checkpointing": ARENA}, {})
    return [[losses(out, zero, block, *how) for block in blocks] for zero, *how in CASES]


def test_losses_are_those_without_the_block(tmp_path: Any) -> None:
    for results in run_ranks(train, 2, str(tmp_path)):
        for (found, saved), (expected, nothing) in results:
            assert found == expected and len(set(found)) == 3
            assert nothing == []
            (peak, allocations), *later = saved
            assert peak == LAYERS * 2 * 8 * 32 * 4  # the hidden states of each layer
            assert allocations == 1 and later == [(peak, 1)] * 2
