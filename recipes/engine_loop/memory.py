"""Counts the bytes that ZeRO leaves to a rank and lets it send: the document's GPT-2 as it starts, and every stage.

torchrun --standalone --nproc_per_node 4 recipes/engine_loop/memory.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero
from recipes.engine_loop.configs import CONFIGS
from recipes.fp8.counting import sent_since

KINDS = ("parameters", "gradients", "master", "optimizer")
HERE = Path(__file__).parent
DOCUMENT: dict[str, Any] = {
    "zero_dp_config.org": HERE / "zero_dp_config.org.json",
    "zero_config.3": CONFIGS["zero_config.3"],
    "zero_off_config": HERE / "zero_off_config.json",
}


def start(model: nn.Module, config: Any) -> hf_zero.ZeroEngine:
    return hf_zero.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=config)[0]


def gpt2_at_start(config: Any) -> dict[str, int]:
    """The memory of this rank with a GPT-2 of 124 M parameters before the first step, as in the document's logs."""
    engine = start(GPT2LMHeadModel(GPT2Config()), config)
    report = engine.memory_report()
    engine.teardown()
    return {kind: report[kind] for kind in (*KINDS, "device", "host")}


def step_at(stage: int) -> dict[str, float]:
    """The bytes of this rank, at rest and sent in a step, for each parameter of a small network.

    Gradients are fp16, as the paper counts them. Without these two keys they are added and sent in fp32.
    """
    config = {
        "communication_data_type": "fp16",
        "data_types": {"grad_accum_dtype": "fp16"},
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    numel = sum(param.numel() for param in model.parameters())
    engine = start(model, config)
    sent: dict[str, float] = {}
    for _ in range(3):
        before = sent_since(engine, {})
        engine.backward(engine(torch.randn(1, 256, dtype=torch.half)).float().square().mean())
        engine.step()
        sent = sent_since(engine, before)
    rest = {kind: engine.memory_report()[kind] / numel for kind in (*KINDS, "total")}
    engine.teardown()
    return {**rest, "sent": sum(sent.values()) / numel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/engine_loop"), help="[outputs/engine_loop]")
    args = parser.parse_args()
    hf_zero.init_distributed()
    stages = [step_at(stage) for stage in range(4)]
    found = {
        "world_size": dist.get_world_size(),
        "gpt2": {name: gpt2_at_start(config) for name, config in DOCUMENT.items()},
        "stages": stages,
    }
    if dist.get_rank() == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "memory.json").write_text(json.dumps(found, indent=2) + "\n")
        print(json.dumps(found, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
