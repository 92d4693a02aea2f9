"""Mistakes that would train or save something wrong raise instead, and name what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import hf_zero
from tests.harness.ranks import RankFailure, run_ranks
from tests.hf.runs import arguments, build, examples, zero_config


def start(stage: int) -> tuple[LlamaForCausalLM, hf_zero.ZeroEngine]:
    model = build()
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def cast_in_training(stage: int) -> None:
    """An update after the cast would change parameters that the model no longer has."""
    model, engine = start(stage)
    model.to(torch.bfloat16)
    ids = torch.arange(12).view(2, 6)
    engine.backward(model(input_ids=ids, labels=ids).loss)
    engine.step()


def test_a_cast_of_the_live_model_is_noticed() -> None:
    for stage in (0, 1, 3):
        for failure in run_ranks(cast_in_training, 2, stage, expect_error=True):
            assert isinstance(failure, RankFailure) and failure.kind == "StateError", failure
            assert "weight" in failure.message and "bf16" in failure.message


def save_with_accelerate(folder: str) -> dict[str, torch.Tensor]:
    """A user's own saving of state_dict() at a stage that keeps parameters whole."""
    model, engine = start(2)
    if engine.rank == 0:
        Accelerator(cpu=True).save(model.state_dict(), folder + "/weights.safetensors", safe_serialization=True)
    dist.barrier()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_plain_state_dict_saves_every_tensor(tmp_path: Path) -> None:
    want = run_ranks(save_with_accelerate, 2, str(tmp_path))[0]
    got = load_file(tmp_path / "weights.safetensors")
    assert got.keys() >= want.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())


def save_on_all(folder: str) -> dict[str, torch.Tensor]:
    model, engine = start(3)
    model.save_pretrained(folder)
    with hf_zero.gathered_params(model):
        if engine.rank == 0:  # as programs for DeepSpeed do
            model.save_pretrained(f"{folder}/gathered")
    return engine.full_state_dict(keep=True)


def test_save_pretrained_on_all_ranks_writes_loadable_weights(tmp_path: Path) -> None:
    want = run_ranks(save_on_all, 2, str(tmp_path))[0]
    for folder in (tmp_path, tmp_path / "gathered"):
        loaded = LlamaForCausalLM.from_pretrained(folder)
        assert all(torch.equal(tensor, want[name]) for name, tensor in loaded.state_dict().items())


def save_on_one(folder: str) -> None:
    model, engine = start(3)
    if engine.rank == 0:
        model.save_pretrained(folder)
    dist.barrier()


@pytest.mark.slow
def test_save_pretrained_on_one_rank_raises(tmp_path: Path) -> None:
    failures = run_ranks(save_on_one, 2, str(tmp_path), expect_error=True)
    said = [failure.message for failure in failures if isinstance(failure, RankFailure)]
    assert any("save_pretrained" in text and "[1]" in text and "every rank" in text for text in said), said
    assert not list(tmp_path.iterdir()), "nothing is written"


class Shampoo(torch.optim.SGD):
    """Stands for an optimizer of other people that looks at whole matrices."""


def unknown_optimizer() -> None:
    model = build()
    hf_zero.initialize(
        model=model,
        optimizer=Shampoo(model.parameters(), lr=1e-3),
        config={"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True},
    )


def test_an_optimizer_that_needs_whole_matrices_is_refused() -> None:
    for failure in run_ranks(unknown_optimizer, 2, expect_error=True):
        assert failure.kind == "ConfigError" and "Shampoo" in failure.message


def clip_alone(stage: int, norms: tuple[float | None, float | None]) -> list[float]:
    """A loop in which ranks clip by `norms`: None does not clip."""
    model, engine = start(stage)
    ids = torch.arange(12).view(2, 6)
    for _ in range(2):
        engine.backward(model(input_ids=ids, labels=ids).loss)
        if (norm := norms[engine.rank]) is not None:
            engine.clip_grad_norm_(norm)
        engine.step()
    return [parameter.sum().item() for parameter in engine.full_state_dict(keep=True).values()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_clip_differently_are_named(stage: int) -> None:
    """Each would scale its own shard of the gradient, and the model would be clipped in parts."""
    for norms in ((0.1, None), (0.1, 0.2)):
        for failure in run_ranks(clip_alone, 2, stage, norms, expect_error=True):
            assert isinstance(failure, RankFailure) and failure.kind == "DivergenceError", failure
            assert "clipped to 0.1" in failure.message
    both, none = run_ranks(clip_alone, 2, stage, (0.1, 0.1)), run_ranks(clip_alone, 2, stage, (None, None))
    assert both[0] == both[1] and both[0] != none[0], "vacuous: nothing is clipped"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_trainer_whose_engine_was_torn_down(stage: int, tmp_path: Path) -> None:
    """It predicts as before; its optimizer was that engine's, so it does not train on as if nothing had happened."""
    args = hf_zero.TrainingArguments(**arguments(str(tmp_path), max_steps=2), zero=zero_config(stage))
    trainer = hf_zero.Trainer(model=build(), args=args, train_dataset=examples(8, 1), eval_dataset=examples(4, 2))
    trainer.train()
    want = trainer.evaluate()["eval_loss"]
    assert trainer.zero is not None
    trainer.zero.teardown()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-6)
    with pytest.raises(hf_zero.StateError, match="torn down"):
        trainer.train()
