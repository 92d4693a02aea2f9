"""A plan, made without processes or weights, is what engine.memory_report() says of the run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.estimate.plan import Plan, plan_model
from hf_zero.estimate.profile import Profile, measure
from tests.harness.ranks import run_ranks

VOCAB, WIDTH, INNER, BATCH, LENGTH = 67, 24, 40, 2, 7
STEPS = 3
MEDIA = ("none", "cpu", "nvme")


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(**{**sizes, "vocab_size": VOCAB, "use_cache": False, **changes})
    model: nn.Module = LlamaForCausalLM(config).train()
    return model


def batch(device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}


def jobs(folder: str) -> list[tuple[str, dict[str, Any]]]:
    """Every legal choice of stage and media, and forms that change what is kept."""
    found = []
    for stage in range(4):
        for optimizer in MEDIA if stage else ("none",):
            for param in MEDIA if stage == 3 else ("none",):
                zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": WIDTH}
                zero["offload_optimizer"] = {"device": optimizer, "nvme_path": folder}
                zero["offload_param"] = {"device": param, "nvme_path": folder, "max_in_cpu": 5000}
                found.append(
                    (f"stage {stage}, optimizer {optimizer}, parameters {param}", {"zero_optimization": zero})
                )
    everything = found[-1][1]["zero_optimization"]
    small = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    more = {
        "bf16": {"bf16": {"enabled": True}},
        "bf16 gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        "clipping": {"gradient_clipping": 1.0, "zero_optimization": everything},
        "bf16 on disk": {"bf16": {"enabled": True}, "zero_optimization": everything},
        "accumulation": {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}},
        "buckets": {"zero_optimization": {"stage": 3, **small}},
        "no overlap": {"zero_optimization": {"stage": 3, "overlap_comm": False}},
        "stage 1 accumulation": {"gradient_accumulation_steps": 3, "zero_optimization": {"stage": 1}},
    }
    found += [(name, {"zero_optimization": {"stage": 3}, **config}) for name, config in more.items()]
    return found


def measured(all_jobs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, int]]:
    reports = []
    for _, config in all_jobs:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        for _ in range(STEPS * engine.accumulation_steps):
            engine.backward(engine(**batch()).loss)
            engine.step()
        engine.finish_updates()
        reports.append(engine.memory_report())
        engine.teardown()
    return reports


def planned(config: dict[str, Any], world_size: int, rank: int, **changes: Any) -> tuple[Plan, Profile]:
    with torch.device("meta"):
        model = llama(**changes)
    resolved = ZeroConfig.load(config).resolve(model=model, world_size=world_size, client_optimizer=True)
    profile = measure(model, resolved, batch("meta"), on_host=True)
    return plan_model(model, resolved, rank=rank, on_host=True, profile=profile), profile


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_plan_is_the_report_of_the_run(world_size: int, tmp_path: Path) -> None:
    all_jobs = jobs(str(tmp_path))
    by_rank = run_ranks(measured, world_size, all_jobs, timeout=240)
    wrong = []
    for rank in range(world_size):
        for (name, config), report in zip(all_jobs, by_rank[rank], strict=True):
            plan, _ = planned(copy.deepcopy(config), world_size, rank)
            if plan.report != report:
                differences = {
                    key: (plan.report[key], report[key]) for key in report if plan.report[key] != report[key]
                }
                wrong.append(f"{name}, rank {rank}: (planned, measured) {differences}")
            assert sum(plan.report[kind] for kind in ("parameters", "gradients", "master", "optimizer")) > 0
    assert not wrong, "\n".join(wrong)
