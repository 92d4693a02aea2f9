"""Callbacks of Trainer read true sizes, weights, gradients and states at every stage, and may edit them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf import runs

pytestmark = pytest.mark.slow  # many short ones

READ = ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight", "model.norm.weight")
DECAY = 0.8
Seen = dict[str, Any]


class Watch(transformers.TrainerCallback):
    """Reads by torch alone, or through hf_zero; halves one gradient before the second step; keeps an average."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        self.seen: Seen = {}
        self.average: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        self.seen["sizes"] = {name: (param.numel(), tuple(param.shape)) for name, param in model.named_parameters()}
        self.seen["count"] = model.num_parameters(), model.num_parameters(only_trainable=True)
        self.average = hf_zero.ShardedEMA(model, DECAY) if self.sharded else copy.deepcopy(model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        named = dict(model.named_parameters())
        for name in READ:
            grad = hf_zero.full_grad(named[name])  # plain parameters too
            assert grad is not None
            self.seen[f"grad {state.global_step} {name}"] = grad
            self.seen[f"before {state.global_step} {name}"] = hf_zero.full_param(named[name])
        if state.global_step == 1:
            halved = hf_zero.full_grad(named[READ[1]])
            assert halved is not None
            hf_zero.set_full_grad(named[READ[1]], halved / 2)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **kwargs: Any) -> None:
        named = dict(model.named_parameters())
        for name in READ:
            self.seen[f"after {state.global_step} {name}"] = hf_zero.full_param(named[name])
            if self.sharded:
                moment = hf_zero.full_optimizer_state(named[name], "exp_avg")
            else:
                moment = optimizer.state[named[name]]["exp_avg"].clone()
            self.seen[f"exp_avg {state.global_step} {name}"] = moment
        if self.sharded:
            self.average.update()
        else:
            with torch.no_grad():
                for mine, theirs in zip(self.average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 1 - DECAY)


def watched(kind: str, stage: int, folder: str) -> Seen:
    with runs.entry(kind, stage) as (arguments_class, trainer_class, extra):
        args = arguments_class(**runs.arguments(folder, max_steps=3), **extra)
        watch = Watch(kind != "ddp")
        trainer = trainer_class(
            model=runs.build(), args=args, train_dataset=runs.examples(40, 1), eval_dataset=runs.examples(9, 2)
        )
        trainer.add_callback(watch)
        trainer.train()
        if kind == "ddp":
            own = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
            trainer.model.load_state_dict(watch.average.state_dict())
            watch.seen["average loss"] = trainer.evaluate()["eval_loss"]
            average = dict(watch.average.named_parameters())
        else:
            with watch.average.swapped():
                watch.seen["average loss"] = trainer.evaluate()["eval_loss"]
                trainer.save_model(folder + "/average")
            average = watch.average.full_state_dict(keep=True)
            own = hf_zero.engine_of(trainer.model).full_state_dict(keep=True)  # type: ignore[union-attr]
        for name in READ:
            watch.seen[f"average {name}"] = average[name].detach().clone()
            watch.seen[f"own {name}"] = own[name]
        return watch.seen


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_a_callback_sees_what_it_would_see_without_sharding(stage: int, tmp_path: Path) -> None:
    want: Seen = run_ranks(watched, 2, "ddp", 0, str(tmp_path / "ddp"), timeout=120, init_group=False)[0]
    for got in run_ranks(watched, 2, "subclass", stage, str(tmp_path / "zero"), timeout=120, init_group=False):
        assert got.keys() == want.keys() and len(want) > 30
        assert got["sizes"] == want["sizes"] and got["count"] == want["count"] and want["count"][0] > 10_000
        assert got["average loss"] == pytest.approx(want["average loss"], rel=2e-5)
        for key, value in want.items():
            if isinstance(value, torch.Tensor):
                assert value.any() and got[key].shape == value.shape, key
                worst = float((got[key] - value).abs().max())
                assert worst <= 2e-6 + 2e-4 * float(value.abs().max()), f"{key} differs by {worst}"
    for name in READ:
        assert not torch.equal(want[f"own {name}"], want[f"average {name}"]), "vacuous"
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "zero" / "average").state_dict()
    assert torch.allclose(saved[READ[1]], want[f"average {READ[1]}"], atol=2e-6)


def edit_matters(folder: str) -> None:
    """The halved gradient is what the step used: the moment says so."""
    seen = watched("subclass", 3, folder)
    name = READ[1]
    second = 0.9 * seen[f"exp_avg 1 {name}"] + 0.1 * seen[f"grad 1 {name}"] / 2
    assert torch.allclose(seen[f"exp_avg 2 {name}"], second, rtol=1e-4, atol=1e-8)
    assert not torch.allclose(seen[f"grad 1 {name}"], seen[f"grad 1 {name}"] / 2, atol=1e-6)


def test_an_edited_gradient_is_what_the_step_uses(tmp_path: Path) -> None:
    run_ranks(edit_matters, 2, str(tmp_path), timeout=120, init_group=False)
