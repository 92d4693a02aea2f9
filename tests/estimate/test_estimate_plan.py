"""A plan, made without processes or weights, is what engine.memory_report() says of the run."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.extras.estimate.account import plan_engine
from hf_zero.extras.estimate.plan import Plan, plan_model
from hf_zero.extras.estimate.profile import Profile, measure
from tests.harness.at_night import all_at_night
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


def batch(device: str = "cpu", shape: tuple[int, int] = (BATCH, LENGTH)) -> dict[str, torch.Tensor]:
    ids = torch.zeros(shape, dtype=torch.long, device=device)
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
    micro = {"train_micro_batch_size_per_gpu": 1}
    small = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    more = {
        "bf16": {"bf16": {"enabled": True}},
        "bf16 gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        "clipping": {"gradient_clipping": 1.0, "zero_optimization": everything},
        "bf16 on disk": {"bf16": {"enabled": True}, "zero_optimization": everything},
        "accumulation": {**micro, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}},
        "buckets": {"zero_optimization": {"stage": 3, **small}},
        "groups": {"zero_optimization": {"stage": 3, "sharding_group": 1}},
        "hybrid": {"zero_optimization": {"stage": 3, "sharding_group": 1, "hybrid_shard": True}},
        "groups on disk": {"zero_optimization": everything | {"sharding_group": 1}},
        "no overlap": {"zero_optimization": {"stage": 3, "overlap_comm": False}},
        "stage 1 accumulation": {**micro, "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 1}},
    }
    found += [(name, {"zero_optimization": {"stage": 3}, **config}) for name, config in more.items()]
    return found


def measured(all_jobs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, int]]:
    reports = []
    logger = logging.getLogger("hf_zero.extras.estimate.account")
    logger.setLevel(logging.INFO)
    for _, config in all_jobs:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        for _ in range(STEPS * engine.accumulation_steps):
            engine.backward(engine(**batch()).loss)
            engine.step()
        engine.finish_updates()
        report = engine.memory_report()
        live = plan_engine(engine).report
        # Without a profile the plan takes the layers in the order of their registration, as this model does.
        assert live.items() <= report.items(), (config, live, report)
        report = {kind: report[kind] for kind in live}  # without what no plan says: allocations, saved inputs
        reports.append(report)
        lines = _Lines()
        logger.addHandler(lines)
        engine.teardown()
        logger.removeHandler(lines)
        assert len(lines.said) == (2 if engine.rank == 0 else 0), lines.said
        if lines.said:
            parameters = f"parameters {report['parameters'] / 1e6:,.1f} | {report['parameters'] / 1e6:,.1f}"
            assert parameters in lines.said[0]
            assert "peak" in lines.said[1]
    return reports


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def planned(
    config: dict[str, Any],
    world_size: int,
    *,
    on_host: bool = True,
    shape: tuple[int, int] = (BATCH, LENGTH),
    **changes: Any,
) -> tuple[list[Plan], Profile]:
    """A plan per rank. What a forward keeps is measured once."""
    with torch.device("meta"):
        model = llama(**changes)
    resolved = ZeroConfig.load(config).resolve(model=model, world_size=world_size, client_optimizer=True)
    profile = measure(model, resolved, batch("meta", shape), on_host=on_host)
    return [
        plan_model(model, resolved, rank=rank, on_host=on_host, profile=profile) for rank in range(world_size)
    ], profile


@pytest.mark.slow
@pytest.mark.parametrize("world_size", all_at_night((1, 2, 3), (3,)))
def test_plan_is_the_report_of_the_run(world_size: int, tmp_path: Path) -> None:
    all_jobs = jobs(str(tmp_path))
    by_rank = run_ranks(measured, world_size, all_jobs, timeout=240)
    wrong = []
    for (name, config), *reports in zip(all_jobs, *by_rank, strict=True):
        plans, _ = planned(copy.deepcopy(config), world_size)
        for rank, (plan, report) in enumerate(zip(plans, reports, strict=True)):
            if plan.report != report:
                differences = {
                    key: (plan.report[key], report[key]) for key in report if plan.report[key] != report[key]
                }
                wrong.append(f"{name}, rank {rank}: (planned, measured) {differences}")
            assert sum(plan.report[kind] for kind in ("parameters", "gradients", "master", "optimizer")) > 0
    assert not wrong, "\n".join(wrong)


def test_activations_are_those_of_a_real_forward() -> None:
    """The activations of the forward, counted on meta, are what autograd saves of real tensors in a real forward."""
    (plain, _), profile = planned({"zero_optimization": {"stage": 3}}, 2)
    model = llama()
    owned = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = batch()
    owned.update(tensor.untyped_storage().data_ptr() for tensor in inputs.values())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    assert loss.requires_grad
    assert profile.saved == pytest.approx(sum(saved.values()), rel=0.05)
    assert profile.peak > profile.saved
    assert plain.device["activations"] <= profile.peak


def test_checkpointing_keeps_less() -> None:
    _, plain = planned({"zero_optimization": {"stage": 3}}, 2, num_hidden_layers=6)
    with torch.device("meta"):
        model = llama(num_hidden_layers=6)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    resolved = ZeroConfig.load({"zero_optimization": {"stage": 3}}).resolve(model=model, client_optimizer=True)
    before = [param.data for param in model.parameters()]
    checkpointed = measure(model, resolved, batch("meta"), on_host=True)
    assert checkpointed.saved < plain.saved / 2
    assert all(
        param.data.shape == data.shape and param.dtype == data.dtype
        for param, data in zip(model.parameters(), before, strict=True)
    )


def test_plans_need_no_memory_and_leave_no_trace(tmp_path: Path) -> None:
    """A model of 7 B parameters, its states on a disk that is not there."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    with torch.device("meta"):
        model = llama(**sizes, vocab_size=32000)
    path = tmp_path / "disk"
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(path)}}
    config = ZeroConfig.load({"bf16": {"enabled": True}, "zero_optimization": zero, "gradient_clipping": 1.0})
    plan = plan_model(model, config.resolve(model=model, world_size=8, client_optimizer=True))
    numel = sum(param.numel() for param in model.parameters())
    assert plan.disk["master"] == pytest.approx(4 * numel / 8, rel=0.01)
    assert plan.disk["optimizer"] == pytest.approx(8 * numel / 8, rel=0.01)
    assert plan.device["parameters"] == pytest.approx(2 * numel / 8, rel=0.01)
    assert "activations" not in plan.device
    assert not path.exists()


@pytest.mark.parametrize("medium", ["none", "cpu"])
def test_what_a_group_shares_is_planned_once(medium: str) -> None:
    plans = {}
    for group in ("all", 1):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "sharding_group": group}
        config = {"zero_optimization": zero | {"offload_param": {"device": medium}}}
        (plans[group], *_), _ = planned(config, 2, on_host=False)
    shared = plans[1].report["parameters"] - plans["all"].report["parameters"]
    assert shared >= 4 * sum(param.numel() for param in llama().parameters())
    where = {"none": "device", "cpu": "host"}[medium]
    assert getattr(plans[1], where)["parameters"] == getattr(plans["all"], where)["parameters"] + shared
    # Beside it, a gather from the host has a layer of it on the device.
    assert plans[1].device_peak + plans[1].host_peak <= plans["all"].memory_peak + (1 + (medium == "cpu")) * shared


def test_pinned_staging_memory_is_taken_at_once(tmp_path: Path) -> None:
    """More buffers than there is to stage: pageable ones cost nothing until they are used."""
    model = llama()
    staging = {}
    for pin, on_host in ((True, False), (False, False), (True, True)):
        param = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0, "buffer_count": 50, "pin_memory": pin}
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": param}
        config = ZeroConfig.load({"zero_optimization": zero})
        plan = plan_model(model, config.resolve(model=model, world_size=1, client_optimizer=True), on_host=on_host)
        staging[pin, on_host] = plan.host["staging"]
        assert plan.disk["parameters"] <= plan.host["staging"]
    assert staging[False, False] == staging[True, True] < staging[True, False]
    assert staging[True, False] % 50 == 0


def test_the_activation_checkpointing_block_moves_saved_inputs() -> None:
    """Layers' inputs leave the device to the byte; a budget is what the regions' own sizes make of it."""
    layers = 6
    inputs = layers * BATCH * LENGTH * WIDTH * 4

    def plan(block: dict[str, Any], *, on_host: bool = False, checkpoints: bool = True) -> tuple[Plan, Profile]:
        with torch.device("meta"):
            model = llama(num_hidden_layers=layers)
        if checkpoints:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        raw = {"zero_optimization": {"stage": 3}, **({"activation_checkpointing": block} if block else {})}
        config = ZeroConfig.load(raw).resolve(model=model, client_optimizer=True)
        profile = measure(model, config, batch("meta"), on_host=on_host)
        return plan_model(model, config, on_host=on_host, profile=profile), profile

    plain, recomputed = plan({})
    host, moved = plan({"cpu_checkpointing": True})
    assert recomputed.saved - moved.saved == inputs == host.host["saved inputs"]
    assert "saved inputs" not in plain.host
    assert host.device_peak < plain.device_peak

    whole = plan({}, checkpoints=False)[1]
    _, kept = plan({"activation_memory": "1GB"})
    assert kept.saved == pytest.approx(whole.saved, rel=0.02)
    _, tight = plan({"activation_memory": 100_000})
    assert moved.saved < tight.saved < kept.saved and tight.inputs is not None
    assert "are recomputed" in tight.inputs.notes[0]
    _, impossible = plan({"activation_memory": 1000})
    assert impossible.inputs is not None and "cannot be met" in impossible.inputs.notes[0]

    for block, text, how in (
        ({"partition_activations": True}, "not in the configuration", {}),
        ({"cpu_checkpointing": True}, "no effect", {"on_host": True}),
        ({"cpu_checkpointing": True}, "no checkpointed regions", {"checkpoints": False}),
    ):
        profile = plan(block, **how)[1]
        assert profile.inputs is not None and text in profile.inputs.notes[-1]
