"""comms_logger: bytes of each stage against the formulas, DeepSpeed's tables, and what is refused."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.config import COLLECTIVES, ZeroConfig
from hf_zero.errors import ConfigError, StateError
from hf_zero.extras.monitors.comms_log import _NAMES
from tests.harness.ranks import run_ranks

LAYERS, STEPS = 3, 2
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def start(stage: int, **keys: Any) -> tuple[Any, int, int]:
    """An engine, the bytes of its model in fp32, and those of the layers. Sizes divide by the ranks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, num_key_value_heads=2, tie_word_embeddings=False))
    whole, layers = (4 * sum(p.numel() for p in one.parameters()) for one in (model, model.model.layers))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "comms_logger": {"enabled": True, **keys},
    }
    return hf_zero.initialize(model=model, config=config)[0], whole, layers


def train(engine: Any, steps: int = STEPS) -> None:
    tokens = torch.arange(4)[None] + engine.rank
    for _ in range(steps):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


def moved(summary: dict[str, Any]) -> dict[str, int]:
    return {name: sum(size * row["count"] for size, row in rows.items()) for name, rows in summary.items()}


def log(stage: int) -> tuple[dict[str, Any], dict[str, int], int, int]:
    engine, whole, layers = start(stage)
    train(engine)
    first = moved(hf_zero.comm.log_summary(return_dict=True)["summary"])
    train(engine)
    found = hf_zero.comm.log_summary(return_dict=True, show_straggler=True)
    both = moved(found["summary"])
    counted = {name: engine.comm.counts[method].nbytes for name, method in ((GATHER, "all_gather"),)}
    engine.teardown()
    with pytest.raises(StateError, match=r'"comms_logger": \{"enabled": true\}'):
        hf_zero.comm.log_summary()
    assert counted[GATHER] == both.get(GATHER, 0) or stage == 0
    per_step = {name: (size - first[name]) // STEPS for name, size in both.items() if size > first[name]}
    return found, per_step, whole, layers


def log_all() -> list[Any]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        found = [log(stage) for stage in range(4)]
        for keys in ({"debug": True, "verbose": True}, {"prof_all": False, "prof_ops": [SCATTER]}):
            engine, _, _ = start(2, **keys)
            train(engine)
            found.append(hf_zero.comm.log_summary(return_dict=True)["summary"])
            engine.teardown()
    return [*found, shown.getvalue()]


def test_bytes_are_those_of_the_formulas_and_tables_are_deepspeeds() -> None:
    (*stages, debug, only, shown), (*_, silent) = run_ranks(log_all, 2)
    for stage, (found, per_step, whole, layers) in enumerate(stages):
        # docs/configuration.md: what stays unsharded between forward and backward is gathered once
        formulas = [
            {"all_reduce": whole},
            {SCATTER: whole, GATHER: whole},
            {SCATTER: whole, GATHER: whole},
            {SCATTER: whole, GATHER: whole + layers},
        ]
        assert per_step == formulas[stage], stage
        rows = [row for sizes in found["summary"].values() for row in sizes.values()]
        assert all(row["total_latency_ms"] > 0 and row["count"] > 0 for row in rows)
        bus = found["summary"]["all_reduce" if stage == 0 else GATHER]
        for row in bus.values():
            share = 1.0 if stage == 0 else 0.5  # of 2 ranks: 2 * (n - 1) / n and (n - 1) / n
            assert row["busbw_avg_gbps"] == pytest.approx(row["tput_avg_gbps"] * share)
            rate = row["msg_size_bytes"] * 8 / 1e9 / (row["avg_latency_ms"] / 1e3)
            assert row["tput_avg_gbps"] == pytest.approx(rate)
        assert found["metadata"]["world_size"] == 2
        waited = [
            row["total_straggler_ms"] for sizes in found["straggler_analysis"].values() for row in sizes.values()
        ]
        assert all(ms >= 0 for ms in waited)
    assert all(" | [" in name for name in debug) and len(debug) > 2
    assert [*only] == [SCATTER]
    assert "Comm. Op            Message Size        Count               Total Latency(ms)   Avg Latency(ms)" in shown
    assert "breakdown with straggler effect" in shown and "comm op: reduce_scatter_tensor | [" in shown
    assert "Comm. Op" not in silent


def test_an_engine_without_the_key_has_no_observer() -> None:
    engine, _, _ = start(1, enabled=False)
    assert not engine.comm.observers
    engine.teardown()
    engine, _, _ = start(1)
    assert len(engine.comm.observers) == 1
    engine.teardown()
    assert not engine.comm.observers
    assert tuple(_NAMES.values()) == COLLECTIVES


def test_an_unknown_operation_is_refused() -> None:
    block = {"enabled": True, "prof_ops": ["all_gather", "send"]}
    with pytest.raises(ConfigError) as raised:
        ZeroConfig.load({"train_micro_batch_size_per_gpu": 1, "comms_logger": block}).resolve()
    assert "comms_logger.prof_ops" in str(raised.value) and '"all_gather"' in str(raised.value)
    assert "all_gather_into_tensor, reduce_scatter_tensor" in str(raised.value)
