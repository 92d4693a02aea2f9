"""The layers that compute in 8 bits, what is refused, and the loops that take the `msamp` block."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
import hf_zero.fp8
from hf_zero.config import ZeroConfig
from hf_zero.config.resolved import Fp8Section
from hf_zero.errors import ConfigError, StateError
from hf_zero.fp8.linears import convert_linears, fp8_weights
from tests.harness.ranks import run_ranks
from tests.harness.torchao_path import use_torchao

O1 = Fp8Section(enabled=True)
CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.mid = nn.Linear(16, 12)
        self.frozen = nn.Linear(12, 16).requires_grad_(False)
        self.conv = nn.Conv1d(1, 1, 3)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(torch.relu(self.mid(self.embed(ids)))))


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model.named_modules() if name}


def convert() -> dict[str, Any]:
    use_torchao()
    model = Tied()
    before = dict(model.named_parameters())
    planned = fp8_weights(model, O1)
    names = convert_linears(model, O1, CPU)
    assert all(model.get_parameter(name) is param for name, param in before.items())
    assert planned == fp8_weights(model, O1) == {model.mid.weight}
    again = convert_linears(model, O1, CPU)  # of a model that another engine had before
    return {"names": names, "again": again, "kinds": kinds(model), "text": str(model)}


def test_linears_with_a_weight_of_their_own_that_trains_are_taken() -> None:
    seen = run_ranks(convert, 1)[0]
    assert seen["names"] == ["mid"] and seen["again"] == []
    assert seen["kinds"] == {
        "embed": "Embedding", "mid": "Float8Linear", "frozen": "Linear", "conv": "Conv1d", "head": "Linear",
    }  # fmt: skip
    assert "(mid): Float8Linear(in_features=16, out_features=12, bias=True" in seen["text"]


def refusal(model: nn.Module, section: Fp8Section, without: str = "", old: bool = False) -> str:
    use_torchao()
    if without:
        sys.modules[without] = None  # type: ignore[assignment]
    if old:
        float8 = types.ModuleType("torchao.float8")
        float8.Float8LinearConfig = type("Float8LinearConfig", (), {"__dataclass_fields__": {}})  # type: ignore[attr-defined]
        sys.modules["torchao"] = types.ModuleType("torchao")
        sys.modules["torchao"].float8 = float8  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as raised:
        convert_linears(model, section, CPU)
    return str(raised.value)


def test_what_cannot_be_converted_is_refused_with_the_remedy() -> None:
    te = Fp8Section(enabled=True, use_te=True)
    layers = nn.Sequential(nn.Linear(2, 2))
    for args, words in (
        ((nn.Sequential(nn.Conv1d(1, 1, 1)), O1), "no nn.Linear that trains"),
        ((nn.Linear(2, 2), O1), "is a nn.Linear itself"),
        ((layers, O1, "torchao"), 'pip install "torchao>='),
        ((layers, O1, "", True), "torchao is too old"),
        ((layers, te, "transformer_engine"), "msamp.use_te = true: TransformerEngine cannot be imported"),
    ):
        assert words in run_ranks(refusal, 1, *args)[0]


# -------------------------------------------------------------------- the configuration
CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"bf16": {"enabled": True}}, "bf16.enabled is true as well"),
    ({"amp": {"enabled": True}}, "amp.enabled is true as well"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is true as well"),
    ({"zero_optimization": {"stage": 3}}, "FP8 goes with stages 0, 1 and 2"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "stay on the device"),
    ({"msamp": {"enabled": True, "opt_level": "O3"}}, "nothing is sharded there"),
    ({"msamp": {"enabled": True, "opt_level": "O4"}}, 'expected "O1", "O2" or "O3"'),
    ({"optimizer": {"type": "Lion"}, "msamp": {"enabled": True, "opt_level": "O2"}}, "those of Adam and AdamW"),
    ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9}}}, "one bit, and msamp in eight"),
]


@pytest.mark.parametrize(("given", "words"), CONFLICTS)
def test_contradictions_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        ZeroConfig.load({"train_batch_size": 1, "msamp": {"enabled": True}, **given}).resolve()
    assert "msamp" in str(raised.value)


def test_a_pipeline_trains_without_it() -> None:
    model = hf_zero.PipelineModule.__new__(hf_zero.PipelineModule)
    with pytest.raises(ConfigError, match="the model is a PipelineModule"):
        nn.Module.__init__(model)
        model.num_pipeline_stages, model.virtual_stages = 2, 1  # type: ignore[misc, assignment]
        ZeroConfig.load({"train_batch_size": 1, "msamp": {"enabled": True}}).resolve(model=model)


def other_optimizer(kind: str) -> str:
    use_torchao()
    model = nn.Sequential(nn.Linear(4, 4))
    given: Any = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "amsgrad": lambda: torch.optim.AdamW(model.parameters(), amsgrad=True),
        "CPUAdam": lambda: hf_zero.optim.CPUAdam(model.parameters()),
    }[kind]()
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}, "msamp": {"enabled": True, "opt_level": "O3"}}
    with pytest.raises(ConfigError) as raised:
        hf_zero.initialize(model=model, optimizer=given, config=config)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["SGD", "amsgrad", "CPUAdam"])
def test_optimizers_without_small_states_are_refused_on_every_rank(kind: str) -> None:
    for text in run_ranks(other_optimizer, 2, kind):
        assert kind in text and "states of 8 and 16 bits (msamp)" in text and 'msamp.opt_level to "O1"' in text


# -------------------------------------------------------------------- loops
def plain_loop(level: str) -> dict[str, Any]:
    use_torchao()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    same, stepped = hf_zero.fp8.initialize(model, optimizer, opt_level=level)
    assert same is model and kinds(model)["2"] == "Float8Linear"
    images = torch.randn(256, 1, 8, 8)
    labels = (images[:, 0, :, 0].sum(1) * 2).long().clamp(-4, 5) + 4
    losses = []
    for step in range(60):
        chosen = torch.arange(32) + 32 * (step % 8)
        stepped.zero_grad()
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        stepped.step()
        losses.append(loss.item())
    schedule.step()
    return {"losses": losses, "lr": stepped.param_groups[0]["lr"], "weight": model[4].weight.detach().clone()}


@pytest.mark.parametrize(("level", "world_size"), [("O1", 1), ("O2", 1), ("O3", 2)])
def test_a_plain_loop_trains(level: str, world_size: int) -> None:
    first, *others = run_ranks(plain_loop, world_size, level)
    assert sum(first["losses"][-8:]) < 0.8 * sum(first["losses"][:8]) and first["lr"] == 1.5e-3
    assert all(torch.equal(one["weight"], first["weight"]) for one in others)


def elementwise_optimizers(kind: str, stage: int) -> list[bool]:
    """Every optimizer of O1 reads fp32 gradients that were rounded to 8 bits."""
    use_torchao()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    before = [param.detach().clone() for param in model.parameters()]
    make: Any = {"SGD": torch.optim.SGD, "Muon": hf_zero.optim.Muon, "Lamb": hf_zero.optim.Lamb}[kind]
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "msamp": {"enabled": True}}
    engine = hf_zero.initialize(model=model, optimizer=make(model.parameters(), lr=0.01), config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 16)).square().mean())
        engine.step()
    return [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize(("kind", "stage"), [("SGD", 0), ("SGD", 2), ("Muon", 1), ("Lamb", 2)])
def test_other_optimizers_at_the_first_level(kind: str, stage: int) -> None:
    assert all(all(moved) for moved in run_ranks(elementwise_optimizers, 2, kind, stage))


def step_with_closure(level: str) -> tuple[str, list[bool]]:
    use_torchao()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    before = [param.detach().clone() for param in model.parameters()]
    config = {"train_micro_batch_size_per_gpu": 4, "msamp": {"enabled": True, "opt_level": level}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, optimizer, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    data = torch.randn(4, 16)

    def closure() -> torch.Tensor:
        loss = engine(data).square().mean()
        engine.backward(loss)
        return loss

    said = ""
    try:
        optimizer.step(closure)
    except StateError as error:
        said = str(error)
    return said, [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]


def test_a_closure_moves_all_weights_or_is_refused_on_every_rank() -> None:
    assert all(not said and all(moved) for said, moved in run_ranks(step_with_closure, 2, "O1"))
    for said, moved in run_ranks(step_with_closure, 2, "O2"):
        assert "closure cannot be used with msamp O2" in said and not any(moved)


def with_trainer(folder: str) -> dict[str, Any]:
    use_torchao()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, num_key_value_heads=2))
    data = [{"input_ids": torch.arange(8) + shift, "labels": torch.arange(8) + shift} for shift in range(16)]
    zero = {
        "zero_optimization": {"stage": 2},
        "msamp": {"enabled": True, "opt_level": "O3"},
        "fp16": {"enabled": "auto"},
    }
    args = hf_zero.TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=2, save_steps=3, logging_steps=1, report_to=[], use_cpu=True,
        learning_rate=1e-2, zero=zero,
    )  # fmt: skip
    trainer = hf_zero.Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    end = [param.detach().clone() for param in model.parameters()]
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    same = all(torch.equal(old, new) for old, new in zip(end, model.parameters(), strict=True))
    return {"losses": losses, "same": same, "kinds": set(kinds(model).values())}


def test_trainer_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    for seen in run_ranks(with_trainer, 2, str(tmp_path), init_group=False, timeout=120):
        assert seen["same"] and "Float8Linear" in seen["kinds"]
        assert seen["losses"][5] < seen["losses"][0]


def with_accelerate() -> list[float]:
    use_torchao()
    from accelerate import Accelerator

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    config = {"zero_optimization": {"stage": 1}, "msamp": {"enabled": True, "opt_level": "O3"}}
    accelerator = Accelerator(cpu=True)
    hf_zero.ZeroPlugin({"train_micro_batch_size_per_gpu": 4, **config}).attach(accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    data, losses = torch.randn(4, 16), []
    for _ in range(10):
        loss = (model(data) - data).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_accelerate_loop_trains() -> None:
    for losses in run_ranks(with_accelerate, 2, init_group=False):
        assert losses[-1] < 0.8 * losses[0]


# -------------------------------------------------------------------- compiled
def train_block(level: str, stage: int, compiled: bool) -> tuple[list[float], int]:
    """The losses, and how many graphs torch.compile made."""
    use_torchao()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
    if compiled:
        model[0].compile(backend="aot_eager")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "msamp": {"enabled": True, "opt_level": level},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    inputs, losses = torch.randn(4, 16, generator=torch.Generator().manual_seed(engine.rank)), []
    for _ in range(4):
        loss = (engine(inputs) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("level", "stage"), [("O1", 0), ("O3", 2)])
def test_compiled_layers_train_as_the_others(level: str, stage: int) -> None:
    """The guide advises it: most of the small operations of a step are torchao's, and are fused then."""
    plain, compiled = (run_ranks(train_block, 2, level, stage, one, timeout=120) for one in (False, True))
    for (want, none), (found, graphs) in zip(plain, compiled, strict=True):
        assert found == pytest.approx(want, rel=1e-5) and want[-1] < 0.8 * want[0]
        assert none == 0 < graphs
