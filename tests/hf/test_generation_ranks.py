"""`generate` where the ranks do different things, where it is refused, and inside Seq2SeqTrainer."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

import hf_zero
from hf_zero.engine.engine import engine_of
from tests.harness.ranks import RankFailure, run_ranks
from tests.hf.test_generation import VOCAB, is_released, llama, prompts, sharded, t5, text

pytestmark = pytest.mark.slow  # many short ones


def generate_on_one() -> list[list[int]]:
    model = llama()
    sharded(model)
    return text(model, 0, "greedy") if dist.get_rank() == 0 else []


def test_generate_on_one_rank_raises() -> None:
    failures = run_ranks(generate_on_one, 2, expect_error=True, timeout=30)
    assert isinstance(failures[0], RankFailure) and failures[0].kind == "StateError", failures
    assert "called generate" in failures[0].message and "[1]" in failures[0].message
    assert "gathered_params" in failures[0].message


def unequal_batches() -> list[bool]:
    """Three batches on rank 0, two on rank 1."""
    plain, model = llama(), llama()
    engine = sharded(model)
    same = []
    with hf_zero.gathered_params(model):
        engine.comm.counts.clear()
        for number in range(3 - dist.get_rank()):
            same.append(
                text(model, 10 * dist.get_rank() + number, "greedy")
                == text(plain, 10 * dist.get_rank() + number, "greedy")
            )
            # as Seq2SeqTrainer does, which sees the mark on the model
            same.append(model.generate(prompts(number), max_new_tokens=3, synced_gpus=True).shape[0] == 2)
        assert not engine.comm.counts
    assert is_released(engine)
    same.append(text(model, 0, "greedy") == text(plain, 0, "greedy"))
    return same


def test_ranks_generate_different_numbers_of_batches_inside_gathered_params() -> None:
    assert run_ranks(unequal_batches, 2) == [[True] * 7, [True] * 5]


def assisted(choice: str, way: str) -> list[bool]:
    """Candidates from the prompt or from another model: ranks need different numbers of forwards."""
    plain, model = llama(), llama()
    sharded(model, choice)
    rank = dist.get_rank()
    ids = prompts(rank, rows=1, length=4).repeat(1, 3)
    settings: dict[str, Any] = {"max_new_tokens": 12}
    if way == "prompt_lookup":
        settings["prompt_lookup_num_tokens"] = 3
    else:
        settings["assistant_model"] = llama(layers=1, seed=0 if rank else 4)
    want = plain.generate(ids, **settings).tolist()
    if way == "sharded":
        settings["assistant_model"] = llama(layers=1, seed=3)
        want = plain.generate(ids, **settings).tolist()
        sharded(settings["assistant_model"], choice)
    return [model.generate(ids, **settings).tolist() == want, len(want[0]) > ids.shape[1]]


@pytest.mark.parametrize("way", ["prompt_lookup", "assistant", "sharded"])
def test_assisted_decoding(way: str) -> None:
    assert run_ranks(assisted, 2, "once", way) == [[True, True]] * 2
    for failure in run_ranks(assisted, 2, "stream", way, expect_error=True):
        assert failure.kind == "StateError" and '"gather_for_generation": "once"' in failure.message
        assert ("prompt_lookup_num_tokens" if way == "prompt_lookup" else "assistant_model") in failure.message


class RoutedExperts(nn.Module):
    """Four experts, of which the text decides which one runs."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(4))
        self.used = set[int]()
        for number, one in enumerate(self.experts):
            for param in one.parameters():
                param.data *= 1 + number / 4

    def forward(self, x: torch.Tensor) -> Any:
        number = int(x.abs().sum() * 100) % 4
        self.used.add(number)
        return self.experts[number](x)


def llama_of_experts() -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = RoutedExperts(layer.mlp)
    model._no_split_modules = model.model._no_split_modules = ["LlamaMLP"]
    return model


def stream_experts() -> tuple[list[bool], list[set[int]]]:
    plain, model = llama_of_experts(), llama_of_experts()
    engine = sharded(model, "stream")
    assert any("experts" in unit.name for unit in engine.units)
    same = []
    for number in range(4):
        seed = 10 * dist.get_rank() + number
        same.append(text(model, seed, "greedy") == text(plain, seed, "greedy"))
    assert is_released(engine)
    return same, [layer.mlp.used for layer in plain.model.layers]


def test_texts_that_use_other_experts_on_every_rank_are_streamed() -> None:
    (first, of_first), (second, of_second) = run_ranks(stream_experts, 2)
    assert first == second == [True] * 4
    assert of_first != of_second or len(of_first[0]) > 1


def batch_continuously(choice: str, way: str) -> None:
    model = llama()
    sharded(model, choice)
    if way == "generate":
        model.generate(prompts(0), max_new_tokens=3, cache_implementation="paged")
    else:
        model.generate_batch(prompts(0).tolist(), max_new_tokens=3)


@pytest.mark.parametrize(("choice", "way"), [("once", "batch"), ("once", "generate"), ("stream", "generate")])
def test_continuous_batching_on_shards_is_refused(choice: str, way: str) -> None:
    for failure in run_ranks(batch_continuously, 2, choice, way, expect_error=True):
        assert failure.kind == "StateError" and "continuous batching" in failure.message


# -------------------------------------------------------------------- the end
def generate_without_engine() -> list[bool]:
    plain, model = llama(), llama()
    engine = sharded(model)
    wrapped = "generate" in model.__dict__
    engine.teardown()
    same = text(model, 1, "greedy") == text(plain, 1, "greedy") if dist.get_rank() == 1 else True
    return [wrapped, "generate" not in model.__dict__, same]


def test_after_a_teardown_generate_is_the_models_own() -> None:
    assert run_ranks(generate_without_engine, 2) == [[True] * 3] * 2


# -------------------------------------------------------------------- Seq2SeqTrainer
def predict(kinds: list[str], folder: str) -> list[tuple[list[list[int]], float, float]]:
    """Return texts of 5 samples, two per batch, the loss, and all-gathers per bucket.

    Neither batches nor samples come out even on two ranks.
    """
    return [_predict(kind, folder) for kind in kinds]


def _predict(kind: str, folder: str) -> tuple[list[list[int]], float, float]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB, (6,), generator=generator).tolist() for _ in range(5)]
    data = [{"input_ids": row, "attention_mask": [1] * 6, "labels": row[:4]} for row in rows]
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_eval_batch_size": 2,
        "predict_with_generate": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    model = t5()
    trainer_class: type[Any] = Seq2SeqTrainer
    if kind != "plain":
        keys = {"stage": 3, "stage3_param_persistence_threshold": 0}
        zero = {"zero_optimization": keys, "gather_for_generation": kind}
        args = hf_zero.zero_arguments(Seq2SeqTrainingArguments)(**settings, zero=zero)
        trainer_class = hf_zero.Seq2SeqTrainer
    else:
        args = Seq2SeqTrainingArguments(**settings)
    result = trainer_class(model=model, args=args).predict(data, max_new_tokens=7, num_beams=2)
    engine = engine_of(model)
    assert (engine is None) == (kind == "plain")
    gathers = 0.0
    if engine is not None:
        assert is_released(engine)
        buckets = sum(buffer.layout.num_buckets for unit in engine.units for buffer in unit.flats)
        gathers = engine.comm.counts["all_gather"].calls / buckets
    return result.predictions.tolist(), float(result.metrics["test_loss"]), gathers


def test_predict_with_generate(tmp_path: Path) -> None:
    """Plain transformers repeats samples until the ranks come out even; the first ones are those of one process."""
    alone = run_ranks(predict, 1, ["plain"], str(tmp_path), init_group=False)[0][0][0]
    assert len(alone) == 5 and len({str(row) for row in alone}) == 5
    for plain, *others in run_ranks(predict, 2, ["plain", "once", "stream"], str(tmp_path), init_group=False):
        want, want_loss, _ = plain
        assert want[:5] == alone
        for got, loss, _ in others:
            assert got == want and math.isclose(loss, want_loss, rel_tol=1e-5)
        # Two batches, each generated for and evaluated: one gather for all of it, not one per token and forward.
        assert others[0][2] == 1 and others[1][2] > 5
