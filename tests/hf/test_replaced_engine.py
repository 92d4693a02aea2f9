"""A model that was loaded in shards becomes trainable, gets adapters, is wrapped and resized, and is never whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_zero
from hf_zero.sharding.flat_param import FlatParam
from tests.harness.at_night import all_at_night
from tests.harness.ranks import run_ranks

VOCAB = 97
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0}


def save(folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=20,
        intermediate_size=36,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, max_shard_size="30KB")
    return folder


def loaded(folder: Path, **zero: Any) -> LlamaForCausalLM:
    hf_zero.enable({"zero_optimization": {**ZERO, **zero}})
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
    finally:
        hf_zero.disable()
    assert hf_zero.engine_of(model) is not None
    return model


def rows(step: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (6, 9), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, step: Any, share: slice, steps: int = 4) -> list[float]:
    losses = []
    for number in range(steps):
        mine = rows(number)[share]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(9)
    return get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def half_frozen(model: nn.Module) -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_("mlp" in name)
    return model


class Scorer(nn.Module):
    """A model of the user's own around one that was loaded."""

    def __init__(self, inner: LlamaForCausalLM) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.scale = nn.Parameter(torch.randn(VOCAB) / 10 + 1)
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.inner(input_ids).logits * self.scale
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss)  # nothing that a tree of tensors would know


def resized(model: LlamaForCausalLM) -> nn.Module:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    model.resize_token_embeddings(VOCAB + 6)
    return model


CHANGES = {
    "nothing": lambda model: model,
    "lora": adapted,
    "frozen": half_frozen,
    "wrapped": Scorer,
    "resized": resized,
}


def compare(folder: Path, change: str, zero: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = CHANGES[change](loaded(folder, **zero))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    if change == "resized":
        torch.manual_seed(0)
        plain.resize_token_embeddings(VOCAB + 6)
    else:
        plain = CHANGES[change](plain)
    rate = 3e-3

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=rate)

    engine, *_ = hf_zero.initialize(
        model=model, optimizer=adam(model), config={"zero_optimization": {**ZERO, **zero}, **config}
    )
    placeholders = all(param.isnan().all() for param in model.parameters())
    start = engine.full_state_dict(keep=True)
    names = set(start) == set(plain.state_dict())
    same_start = all(torch.equal(start[name], value) for name, value in plain.state_dict().items())
    losses = train(model, engine.step, slice(rank, None, world))
    optimizer = adam(plain)
    reference = []
    for number in range(4):
        optimizer.zero_grad()
        loss = torch.stack(
            [plain(input_ids=part, labels=part).loss for part in (rows(number)[r::world] for r in range(world))]
        ).mean()
        loss.backward()
        optimizer.step()
        reference.append(loss.item())
    end = engine.full_state_dict(keep=True)
    worst = max((end[name] - value).abs().max().item() for name, value in plain.state_dict().items())
    moved = max((end[name] - start[name]).abs().max().item() for name in end)
    return {
        "placeholders": placeholders,
        "names": names,
        "same_start": same_start,
        "losses": losses,
        "reference": reference,
        "worst": worst,
        "moved": moved,
        "tied": getattr(getattr(model, "lm_head", None), "weight", None) is model.get_input_embeddings().weight
        if isinstance(model, LlamaForCausalLM)
        else None,
    }


CASES: list[tuple[str, dict[str, Any]]] = [(change, {}) for change in CHANGES] + [
    ("lora", {"offload_param": {"device": "cpu"}}),
    ("nothing", {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
    ("frozen", {"offload_optimizer": {"device": "cpu"}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "zero"), CASES, ids=[f"{change}-{'+'.join(zero)}" for change, zero in CASES])
@pytest.mark.parametrize("world_size", all_at_night((2, 3), (3,)))
def test_training_after_a_sharded_load_equals_one_process(
    change: str, zero: dict[str, Any], world_size: int, tmp_path: Path
) -> None:
    check(save(tmp_path), change, zero, world_size, tied=True)


@pytest.mark.slow
def test_untied_embeddings_are_resized(tmp_path: Path) -> None:
    check(save(tmp_path, tied=False), "resized", {}, 2, tied=False)


def check(folder: Path, change: str, zero: dict[str, Any], world_size: int, *, tied: bool) -> None:
    outcomes = run_ranks(compare, world_size, folder, change, zero, {}, timeout=120)
    for outcome in outcomes:
        assert outcome["placeholders"] and outcome["names"] and outcome["same_start"]
        assert outcome["tied"] in (None, tied)
        assert outcome["worst"] < 2e-5 < 1e-3 < outcome["moved"]
    mean = [sum(each) / world_size for each in zip(*(one["losses"] for one in outcomes), strict=True)]
    assert mean == pytest.approx(outcomes[0]["reference"], abs=2e-5)


def prepared(folder: Path) -> tuple[int, int, bool]:
    """Return, under accelerate: flat parameters that were built, resolves of the configuration, whether
    units stayed.
    """
    config = {"zero_optimization": ZERO, "train_micro_batch_size_per_gpu": 2}
    model = loaded(folder)
    before = [flat for unit in hf_zero.engine_of(model).units for flat in unit.flats]  # type: ignore[union-attr]
    accelerator = hf_zero.ZeroPlugin(config).attach(Accelerator(cpu=True))
    counted = {"built": 0, "resolved": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, owner, method in (("built", FlatParam, "__init__"), ("resolved", hf_zero.ZeroConfig, "resolve")):
            patch.setattr(owner, method, counting(counted, name, getattr(owner, method)))
        accelerator.prepare(model)
    engine = hf_zero.engine_of(model)
    assert engine is not None and engine.trains
    after = [flat for unit in engine.units for flat in unit.flats]
    return counted["built"], counted["resolved"], all(a is b for a, b in zip(before, after, strict=True))


def counting(counted: dict[str, int], name: str, original: Any) -> Any:
    def count(*args: Any, **kwargs: Any) -> Any:
        counted[name] += 1
        return original(*args, **kwargs)

    return count


def test_a_prepared_model_keeps_what_from_pretrained_built(tmp_path: Path) -> None:
    assert run_ranks(prepared, 2, save(tmp_path), timeout=120) == [(0, 1, True)] * 2
