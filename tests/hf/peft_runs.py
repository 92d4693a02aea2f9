"""Training runs of models with adapters, as plain DDP and under hf_zero, and what their checkpoints weigh.

A function here runs on every rank with the environment that torchrun sets (tests.harness.ranks).
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_zero
from tests.hf.runs import Outcome, arguments, build, entry, examples, outcome

# The LoraConfig of each feature has this beside rank and targets.
FEATURES: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "lora_bias": False},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "tokens": {"trainable_token_indices": [3, 5, 8]},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "all": {"use_dora": True, "target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    "bf16_base": {},
}


def with_adapters(feature: str, seed: int = 0) -> Any:
    """A tiny Llama with the adapters of `feature`, one fp32 norm and an integer buffer."""
    model = build(seed=seed)
    model.model.layers[0].register_buffer("num_seen", torch.tensor([3, 4], dtype=torch.int64))
    if feature == "bf16_base":
        model = model.to(torch.bfloat16)
        # One fp32 norm, whose output goes on in the type of its input.
        norm = model.model.layers[0].input_layernorm.float()
        norm.register_forward_hook(lambda module, args, out: out.to(args[0].dtype))
    torch.manual_seed(seed + 1)
    if feature == "own":
        return own_adapters(model)
    config = {"r": 3, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **FEATURES[feature]}
    return get_peft_model(model, LoraConfig(**config))


class OwnLora(nn.Module):
    """A frozen linear layer with trainable factors beside it, made without PEFT."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


def own_adapters(model: Any) -> Any:
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = OwnLora(layer.self_attn.q_proj, 3)
        layer.mlp.down_proj = OwnLora(layer.mlp.down_proj, 3)
    return model


def train(kind: str, stage: int, folder: str, feature: str, seed: int = 0, resume: Any = None, **more: Any) -> Outcome:
    """Train for six steps and save the adapters."""
    with entry(kind, stage) as (arguments_class, trainer_class, extra):
        args = arguments_class(**arguments(folder, **{"max_steps": 6, **more}), **extra)
        model = with_adapters(feature, seed)
        trainer = trainer_class(model=model, args=args, train_dataset=examples(40, 1))
        trainer.train(resume_from_checkpoint=resume)
        result = outcome(trainer, folder + "/final")
        engine = hf_zero.engine_of(model)
        if engine is not None:
            types = {name: tensor.dtype for name, tensor in engine.full_state_dict(keep=True).items()}
            assert types == {name: tensor.dtype for name, tensor in with_adapters(feature, seed).state_dict().items()}
        return result
