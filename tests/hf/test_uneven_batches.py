"""Ranks with different numbers of batches under Trainer: the same updates as one process that has all batches."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import BartConfig, BartForConditionalGeneration, default_data_collator

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf.runs import build, examples, zero_config

SAMPLES = (13, 10)  # of each rank, in batches of 2: 7 and 5
NUM_BATCHES = {"stop": 5, "join": 7}
RATE, NORM = 0.05, 0.5


class Stream(IterableDataset[Any]):
    """A stream of samples of one rank."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def samples(rank: int, seed: int = 0) -> list[Any]:
    rows = examples(SAMPLES[rank], seed + rank)
    for row in rows:
        row["labels"][0] = -100  # transformers 5.6 counts it, though no token predicts it
    return rows


class Plain(nn.Module):
    """A model that takes no number of items: its loss is the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


MODELS = {"by tokens": build, "by batches": Plain}


class OwnLoaders(hf_zero.Trainer):
    """Each rank has samples of its own, which nothing divides again."""

    def get_train_dataloader(self) -> Any:
        return self._loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._loader(self.eval_dataset)

    def _loader(self, rows: Any) -> Any:
        return DataLoader(rows, batch_size=2, collate_fn=default_data_collator)


def arguments(stage: int, mode: str, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "zero": zero_config(stage, uneven_data=mode, desync_timeout=20),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": NORM,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "include_num_input_tokens_seen": "all",
        **more,
    }


def train(stage: int, mode: str, kind: str, accumulation: int) -> dict[str, Any]:
    """Two epochs of Trainer and an evaluation, on one of two ranks; without accumulation, the data has no length."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    rows = samples(rank)
    steps = {"num_train_epochs": 2} if accumulation == 2 else {"max_steps": 2 * NUM_BATCHES[mode]}
    trainer = OwnLoaders(
        model=MODELS[kind](),
        args=hf_zero.TrainingArguments(**arguments(stage, mode, gradient_accumulation_steps=accumulation, **steps)),
        train_dataset=rows if accumulation == 2 else Stream(rows),
        eval_dataset=samples(rank, seed=9),
    )
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    evaluated = trainer.evaluate()
    return {
        "losses": [line["loss"] for line in log],
        "norms": [line["grad_norm"] for line in log],
        "evaluation": evaluated["eval_loss"],
        "tokens": trainer.state.num_input_tokens_seen,
        "steps": trainer.state.global_step,
    }


CASES = list(itertools.product(("stop", "join"), MODELS, (1, 2)))


def train_all(stage: int) -> list[dict[str, Any]]:
    return [train(stage, *case) for case in CASES]


def batches_of(rank: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    rows = samples(rank, seed)
    return [default_data_collator(rows[first : first + 2]) for first in range(0, len(rows), 2)]


def expected(mode: str, kind: str, accumulation: int) -> dict[str, Any]:
    """The same training in one process with torch.optim, without Trainer."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    by_rank = [batches_of(rank)[: NUM_BATCHES[mode]] for rank in range(2)]
    losses, norms = [], []
    for first in [*range(0, NUM_BATCHES[mode], accumulation)] * 2:
        batches = [batch for one in by_rank for batch in one[first : first + accumulation]]
        weights = [(batch["labels"][:, 1:] != -100).sum().item() if kind == "by tokens" else 1 for batch in batches]
        loss = sum(model(**batch).loss * weight / sum(weights) for batch, weight in zip(batches, weights, strict=True))
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), NORM).item())
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        evaluation = [model(**batch).loss.item() for rank in range(2) for batch in batches_of(rank, seed=9)]
    return {
        "losses": losses,
        "norms": norms,
        "evaluation": sum(evaluation) / len(evaluation),
        "tokens": 2 * sum(batch["input_ids"].numel() for one in by_rank for batch in one),
        "steps": len(losses),
    }


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_ranks_with_more_and_fewer_batches(stage: int) -> None:
    for rank in run_ranks(train_all, 2, stage, timeout=120):
        for case, got in zip(CASES, rank, strict=True):
            want = expected(*case)
            assert want["losses"][0] != pytest.approx(want["losses"][-1], rel=1e-2), "vacuous: nothing was learned"
            assert got == {name: pytest.approx(value, rel=2e-5) for name, value in want.items()}


# -------------------------------------------------------------------- what else ranks may lack
def train_where_one_rank_has_nothing(mode: str) -> list[float]:
    rows = samples(0) if dist.get_rank() == 0 else []
    torch.manual_seed(0)
    args = hf_zero.TrainingArguments(**arguments(3, mode, max_steps=2))
    trainer = OwnLoaders(model=build(), args=args, train_dataset=Stream(rows))
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_a_rank_without_any_batch() -> None:
    torch.manual_seed(0)
    model, batches = build(), batches_of(0)[:2]
    weights = [(batch["labels"][:, 1:] != -100).sum().item() for batch in batches]
    first = sum(model(**batch).loss.item() * weight for batch, weight in zip(batches, weights, strict=True))
    for losses in run_ranks(train_where_one_rank_has_nothing, 2, "join"):
        assert losses[0] == pytest.approx(first / sum(weights), rel=1e-5) and losses[1] < losses[0]
    assert run_ranks(train_where_one_rank_has_nothing, 2, "stop") == [[], []]


def train_without_the_key() -> str:
    trainer = OwnLoaders(
        model=build(),
        args=hf_zero.TrainingArguments(**arguments(2, "error")),
        train_dataset=samples(dist.get_rank()),
    )
    with pytest.raises(hf_zero.ConfigError) as caught:
        trainer.train()
    return str(caught.value)


def test_without_the_key_it_is_an_error_of_all_ranks() -> None:
    for text in run_ranks(train_without_the_key, 2):
        assert "rank 0 7, rank 1 5" in text and '"stop"' in text and '"join"' in text


# -------------------------------------------------------------------- generation
def translator() -> BartForConditionalGeneration:
    torch.manual_seed(3)
    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1, init_std=0.5, **sizes)
    return BartForConditionalGeneration(config)


def predict() -> list[list[int]]:
    args = hf_zero.Seq2SeqTrainingArguments(
        **arguments(3, "join"), predict_with_generate=True, generation_max_length=6, generation_num_beams=1
    )
    trainer = hf_zero.Seq2SeqTrainer(model=translator(), args=args, data_collator=default_data_collator)
    trainer.get_test_dataloader = lambda rows: OwnLoaders._loader(trainer, rows)  # type: ignore[method-assign]
    predictions: list[list[int]] = trainer.predict(samples(dist.get_rank())).predictions.tolist()
    return predictions


def test_predictions_of_every_sample_come_once() -> None:
    model = translator().eval()
    by_rank = [
        [model.generate(batch["input_ids"], max_length=6, num_beams=1).tolist() for batch in batches_of(rank)]
        for rank in range(2)
    ]
    rows = [row for pair in itertools.zip_longest(*by_rank, fillvalue=[]) for batch in pair for row in batch]
    assert len({tuple(row) for row in rows}) > 3, "vacuous: all are equal"
    longest = max(map(len, rows))
    padded = [row + [1] * (longest - len(row)) for row in rows]
    for predictions in run_ranks(predict, 2):
        assert [row[:longest] for row in predictions] == padded and len(predictions) == sum(SAMPLES)
