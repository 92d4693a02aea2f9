"""Saved inputs of checkpointed layers on the lag device: none of them is left there between forward and backward, the
bits are those of the CPU without the block, and after the first step nothing is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from hf_zero.extras.activations import active
from hf_zero.extras.activations.budget import Choice, least, peak_of
from hf_zero.extras.deepspeed import checkpointing
from tests.harness.ranks import run_ranks
from tests.lag import device, group
from tests.lag.matrix_runs import LENGTH, batch, digest, llama, start, zero_of

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

STEPS = 3
LAYERS, HIDDEN = 2, 16
ON_HOST = {"cpu_checkpointing": True}
DOCUMENTS = {
    "partition_activations": True,
    "cpu_checkpointing": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 4,
}
ON_DEVICE = {**DOCUMENTS, "cpu_checkpointing": False, "number_checkpoints": LAYERS}
# stage, medium of offload, reentrant, LoRA, the block, schedule
RUNS = [
    (0, "none", True, False, ON_HOST, "late"),
    (1, "cpu", False, False, DOCUMENTS, "random:1"),
    (2, "none", False, True, ON_HOST, "late"),
    (3, "none", True, False, DOCUMENTS, "late"),
    (3, "cpu", True, True, ON_HOST, "random:2"),
    (3, "nvme", False, False, ON_HOST, "early"),
    (3, "none", False, False, ON_DEVICE, "late"),
    (1, "nvme", True, True, ON_HOST, "random:3"),
]
Run = tuple[int, str, bool, bool, dict[str, Any], str]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def train(run: Run, block: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    """Two micro-batches a step, attention dropout; a text in between, and a forward whose graph is dropped."""
    stage, medium, is_reentrant, lora, _, _ = run
    model: Any = llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    if lora:
        peft = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, peft)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    more = {} if block is None else {"activation_checkpointing": block}
    engine = start(model, zero_of(stage, medium, folder), accumulation=2, clip=0.5, **more)
    now, usages, losses, texts = active.current(), [], [], []
    assert (now is None) == (block is None)
    torch.manual_seed(1 + engine.rank)
    for step in range(STEPS):
        for micro in range(2):
            ids = batch(step, micro, 2).to(engine.device)
            engine(input_ids=ids, labels=ids)
            loss = engine(input_ids=ids, labels=ids).loss
            if now is not None and micro == 0:  # in the second one nobody waits for the copies
                torch.accelerator.synchronize()
                usages.append({**now.saved.usage(), "regions": now.saved.num_live})
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        if step == 0:
            model.eval()
            text = model.generate(input_ids=batch(5, 0, 2).to(engine.device), max_new_tokens=3, do_sample=False)
            texts.append(text.tolist())
            model.train()
    outcome = {"losses": [loss.item() for loss in losses], "weights": digest(engine.full_state_dict(keep=True))}
    if now is not None:
        usages.append({**now.saved.usage(), "regions": now.saved.num_live})
    engine.teardown()
    assert active.current() is None
    return {"outcome": {**outcome, "texts": texts}, "usages": usages}


def on_cpu(folder: str) -> list[Any]:
    return [train(run, None, f"{folder}/{number}")["outcome"] for number, run in enumerate(RUNS)]


def on_lag(folder: str) -> list[Any]:
    device.enable()
    group.register()
    results = []
    for number, run in enumerate(RUNS):
        device.set_schedule(run[5])
        results.append(train(run, run[4], f"{folder}/{number}"))
        torch.accelerator.synchronize()
        assert device.take_reports() == [], run
    return results


def test_inputs_on_the_host_give_the_bits_of_the_cpu(tmp_path: Path) -> None:
    expected = run_ranks(on_cpu, 2, str(tmp_path / "cpu"), init_group=False)
    found = run_ranks(on_lag, 2, str(tmp_path / "lag"), init_group=False)
    nbytes = 2 * LENGTH * HIDDEN * 4 * LAYERS
    for rank in range(2):
        for number, run in enumerate(RUNS):
            result = found[rank][number]
            assert result["outcome"] == expected[rank][number], (rank, run)
            *between, last = result["usages"]
            for usage in between:
                held = usage["device" if run[4] is ON_DEVICE else "host"]
                assert held >= nbytes and usage["regions"] == LAYERS, (rank, run, usage)
                assert run[4] is ON_DEVICE or usage["device"] == 0, (rank, run, usage)
            assert last["device"] == last["host"] == last["regions"] == 0, (rank, run, last)
            assert last["allocations"] == between[1]["allocations"] > 0, (rank, run, last)


# ---------------------------------------------------------------- two ranks that share inputs
def shared(block: dict[str, Any], folder: str, *, on_device: bool) -> Any:
    """Both ranks have the same batches and random numbers."""
    if on_device:
        device.enable()
        group.register()
        device.set_schedule("late")
    results = []
    for is_reentrant in (True, False):
        model: Any = llama().train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.2
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        engine = start(model, zero_of(2, "none", folder), accumulation=1, clip=0.0)
        ranks = torch.distributed.new_group([0, 1]) if block else None
        checkpointing.configure(ranks, {"activation_checkpointing": block}) if block else None
        torch.manual_seed(1)
        losses, usages = [], []
        for step in range(STEPS):
            ids = batch(step, 0, 2)
            torch.distributed.broadcast(ids := ids.to(engine.device), 0)
            loss = engine(input_ids=ids, labels=ids).loss
            if block and (now := active.current()) is not None:
                torch.accelerator.synchronize()
                usages.append(now.saved.usage())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        outcome = losses, digest(engine.full_state_dict(keep=True))
        if block:
            assert checkpointing._end is not None
            checkpointing._end()
            active.share_inputs(None)
        engine.teardown()
        results.append((outcome, usages))
    if on_device:
        assert device.take_reports() == []
    return results


def shared_on_lag(folder: str) -> Any:
    return shared({**DOCUMENTS, "number_checkpoints": LAYERS}, folder, on_device=True)


def shared_on_cpu(folder: str) -> Any:
    return shared({}, folder, on_device=False)


def test_two_ranks_keep_a_half_each_on_the_host(tmp_path: Path) -> None:
    expected = run_ranks(shared_on_cpu, 2, str(tmp_path), init_group=False)
    found = run_ranks(shared_on_lag, 2, str(tmp_path), init_group=False)
    whole, slot = 2 * LENGTH * HIDDEN * 4, 512
    assert whole // 2 <= slot < whole, "vacuous: a whole input would not need more"
    for mine, plain in zip(found, expected, strict=True):
        for (outcome, usages), (losses, _) in zip(mine, plain, strict=True):
            assert outcome == losses and len(set(outcome[0])) == STEPS
            assert [usage["device"] for usage in usages] == [0] * STEPS
            assert [usage["host"] for usage in usages] == [LAYERS * slot] * STEPS, usages
            assert usages[-1]["allocations"] == usages[0]["allocations"] == 1


# ---------------------------------------------------------------- waits at every border
def borders() -> list[list[str]]:
    """Return for a step of two regions, without and with synchronize_checkpoint_boundary: what the host waits for
    there.
    """
    device.enable()
    device.set_schedule("late")
    found = []
    for synchronize in (False, True):
        for is_reentrant in (True, False):
            checkpointing.configure(synchronize=synchronize)
            region = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to(device.NAME)
            x = torch.ones(2, 4, device=device.NAME, requires_grad=True)
            device.take_syncs()
            hidden = checkpoint(region, x * 2, use_reentrant=is_reentrant)
            checkpoint(region, hidden * 2, use_reentrant=is_reentrant).sum().backward()
            found.append([kind for kind, where in device.take_syncs() if "active.py" in where])
            assert checkpointing._end is not None
            checkpointing._end()
            torch.accelerator.synchronize()
    return found


def test_synchronize_waits_before_and_after_every_forward_and_recomputation() -> None:
    ((*without, first, second),) = run_ranks(borders, 1, init_group=False)
    assert without == [[], []]
    assert first == second == ["device.synchronize"] * 2 * 4


# ---------------------------------------------------------------- a budget
DEEP = 6


def deep(memory: int | str | None) -> dict[str, Any]:
    """Three steps of a model of DEEP layers: bytes that the forward of the last one leaves, and all losses."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": DEEP, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1)
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    block = {} if memory is None else {"activation_checkpointing": {"activation_memory": memory}}
    engine = start(model, zero_of(0, "none", ""), accumulation=1, clip=0.0, **block)
    now = active.current()
    torch.manual_seed(1)
    losses, ids = [], torch.randint(64, (4, 64)).to(engine.device)
    for _ in range(3):
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        loss = engine(input_ids=ids, labels=ids).loss
        torch.accelerator.synchronize()
        if now is not None:
            now.saved.usage()  # lets go of what is copied
        left = torch.accelerator.memory_allocated() - before
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    budget = None if now is None else now.budget
    engine.teardown()
    return {"left": left, "losses": losses, "budget": budget}


def budgets() -> Any:
    device.enable()
    group.register()
    plain, whole = deep(None), deep("1GB")
    sizes = whole["budget"].sizes
    most, recomputed = (peak_of(sizes, [choice] * DEEP) for choice in (Choice.KEEP, Choice.RECOMPUTE))
    smallest = least(sizes, can_offload=True)
    limits = [smallest, (smallest + recomputed) // 2, recomputed, (recomputed + most) // 2, most]
    runs = [deep(limit) for limit in limits]
    assert device.take_reports() == []
    return plain, runs


def test_a_budget_keeps_recomputes_and_copies_to_the_host() -> None:
    ((plain, runs),) = run_ranks(budgets, 1, init_group=False)
    seen: set[Choice] = set()
    for run in runs:
        budget = run["budget"]
        assert run["losses"] == plain["losses"] and len(set(plain["losses"])) == 3
        assert peak_of(budget.sizes, budget.choices) <= budget.limit
        pairs = [*zip(budget.sizes, budget.choices, strict=True)]
        planned = sum(size.held(choice) - size.held(Choice.RECOMPUTE) for size, choice in pairs)
        assert run["left"] - plain["left"] == pytest.approx(planned, rel=0.03, abs=20_000), budget.choices
        seen.update(budget.choices)
    assert seen == set(Choice)
    assert [run["left"] for run in runs] == sorted(run["left"] for run in runs)
