"""The engine of a pipeline shares this with the other one: precisions, offload, schedulers, data, log lines.

One job of two ranks runs all of it; the plain engine, alone on a rank of its own, says what is right.
"""

from __future__ import annotations

import csv
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.extras.pipeline.layer_spec import LayerSpec
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.utils import RepeatingLoader
from tests.harness.ranks import run_ranks
from tests.pipeline import models

MICROS, STEPS = 3, 4
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICROS,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2}},
}
SCALED = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
# Name -> (configuration, kind of model, stages)
PRECISIONS: dict[str, tuple[dict[str, Any], str, int]] = {
    "fp32": ({}, "plain", 2),
    "in place": ({}, "in place", 2),
    "bf16": ({"bf16": {"enabled": True}}, "plain", 2),
    "bf16 tied": ({"bf16": {"enabled": True}}, "tied", 2),
    "bf16 clipped": ({"bf16": {"enabled": True}, "gradient_clipping": 0.1}, "tied", 2),
    "fp16": ({"fp16": SCALED}, "plain", 2),
    "fp16 tied zero bubble": ({"fp16": SCALED, "pipeline": {"schedule": "zero_bubble"}}, "tied", 2),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "plain", 2),
    "offload": ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "plain", 2),
    "offload clipped": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0.1},
        "tied",
        2,
    ),
    "offload, one stage": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0.1},
        "plain",
        1,
    ),
}
OVERFLOWS_AT = 2  # step


def micro_batches(step: int) -> list[models.Micro]:
    return [
        micro for number, one in enumerate(models.batches(STEPS, 1, 2 * MICROS)) for micro in one[0] if number == step
    ]


class Overflow:
    """A hook that makes the gradient of its tensor infinite in one step."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        return torch.full_like(grad, float("inf")) if self.step == OVERFLOWS_AT else None


def sequential(variant: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[Any] = [spec.build() for spec in models.layers_of("plain")]
    if variant == "tied":
        layers[-1] = Tied(layers[0])
    if variant == "in place":
        layers[4] = nn.ReLU(inplace=True)  # the first layer of stage 1
    return nn.Sequential(*layers)


class Tied(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return models.to_words(self, x)


def history(engine: Any, losses: list[float]) -> dict[str, Any]:
    return {
        "losses": losses,
        "norm": engine.get_global_grad_norm(),
        "lr": engine.get_lr(),
        "steps": engine.global_steps,
        "micro": engine.micro_steps,
        "skipped": engine.skipped_steps,
        "scale": engine.optimizer.cur_scale,
    }


def run_pipeline(name: str) -> dict[str, Any]:
    config, variant, stages = PRECISIONS[name]
    module = PipelineModule(sequential(variant), num_stages=stages, loss_fn=models.loss_of)
    if variant == "in place":
        assert module.parts == [0, 4, 8]
    overflow = Overflow()
    if "fp16" in config and module.stage_id == stages - 1:
        module.get_submodule("6").register_forward_hook(lambda _, args, out: _hooked(out, overflow))
    accumulation = MICROS * 2 // (2 // stages)
    engine, *_ = hf_zero.initialize(
        model=module, config={**BASE, **config, "gradient_accumulation_steps": accumulation}
    )
    losses = []
    for overflow.step in range(STEPS):
        mine = micro_batches(overflow.step)[module.grid.data_parallel_id * accumulation :][:accumulation]
        losses.append(engine.train_batch(iter(mine)).item())
    found = history(engine, losses)
    for key, place, is_here in (
        ("last weight", "7", engine.is_last_stage()),
        ("first weight", "0", engine.is_first_stage()),
    ):
        found[key] = module.get_submodule(place).weight.detach().float().clone() if is_here else None
    found["state"] = engine.full_state_dict(keep=engine.is_last_stage())
    if stages == 2:
        engine.load_full_state_dict(found["state"] or dict(module.state_dict()))
    engine.teardown()
    return found


def _hooked(out: torch.Tensor, overflow: Overflow) -> None:
    if out.requires_grad:
        out.register_hook(overflow)


def run_plain(name: str) -> dict[str, Any]:
    config, variant, _ = PRECISIONS[name]
    config = {key: value for key, value in config.items() if key != "pipeline"}
    model, overflow = sequential(variant), Overflow()
    if "fp16" in config:
        model[6].register_forward_hook(lambda _, args, out: _hooked(out, overflow))
    engine, *_ = hf_zero.initialize(model=model, config={**BASE, **config, "gradient_accumulation_steps": MICROS * 2})
    losses = []
    for overflow.step in range(STEPS):
        total = 0.0
        for words, labels in micro_batches(overflow.step):
            loss = models.loss_of(engine(words), labels)
            engine.backward(loss)
            engine.step()
            total += loss.item() / (MICROS * 2)
        losses.append(total)
    found = history(engine, losses)
    found["last weight"] = model[7].weight.detach().float().clone()
    found["first weight"] = model[0].weight.detach().float().clone()
    found["state"] = engine.full_state_dict(keep=True)
    engine.teardown()
    return found


class Mixed(nn.Module):
    """Passes on a dict with what a stage may send: floats, integers, booleans, nothing, a tensor without elements."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.first = first
        self.inner = nn.Linear(4, 4)

    def forward(self, given: Any) -> Any:
        if self.first:
            given = {"x": given, "mask": given > 0, "ids": torch.arange(given.numel()), "none": None, "number": 2.5}
            given["empty"] = torch.empty(0, 3)
        assert given["mask"].dtype == torch.bool and given["none"] is None and given["number"] == 2.5
        assert given["ids"].tolist() == list(range(given["x"].numel())) and given["empty"].shape == (0, 3)
        return {**given, "x": torch.tanh(self.inner(given["x"])) * given["mask"]}


class Pick(nn.Module):
    def forward(self, given: Any) -> torch.Tensor:
        return given["x"].square().mean()


def data_and_lines(folder: str) -> dict[str, Any]:
    """Train with data of all sorts, evaluate in between, and return what is logged where."""
    found: dict[str, Any] = {"threads before": threading.active_count()}
    torch.manual_seed(3)
    layers = [LayerSpec(Mixed, True), LayerSpec(Mixed), LayerSpec(Mixed), Pick()]
    module = PipelineModule(layers, num_stages=2, partition_method="uniform")
    samples = [(torch.full((4,), float(number)), 0) for number in range(8)]
    config = {
        **BASE,
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
    }
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    engine, _, loader, _ = hf_zero.initialize(model=module, config=config, training_data=samples)
    assert loader is not None
    found["order"] = [value for batch in loader for value in batch[0][:, 0].tolist()]
    found["loader"] = [engine.train_batch().item() for _ in range(3)]  # 9 of 4 micro-batches: it begins anew
    weights = [param.detach().clone() for param in module.parameters()]
    batch = [(torch.ones(3, 4), None) for _ in range(5)]
    found["eval"] = engine.eval_batch(iter(batch), num_micro_batches=5).item()
    result, outputs = engine.eval_batch(iter(batch), return_logits=True, compute_loss=False, reduce_output=None)
    found["outputs"] = (None if result is None else len(result), len(outputs))
    one = engine.eval_batch(iter(batch), bcast_loss=False)
    found["bcast"] = one is not None
    found["untouched"] = all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))
    engine.set_batch_fn(lambda given: (given["x"], None))
    engine.set_dataiterator(iter([{"x": torch.ones(2, 4)}] * MICROS))
    found["batch_fn"] = engine.train_batch().item() > 0
    one = RepeatingLoader([{"x": torch.ones(2, 4)}])
    found["repeated"] = [engine.train_batch(one).item() > 0 for _ in range(2)]
    found["samples"] = engine.global_samples
    found["parallel"] = (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel)
    engine.save_16bit_model(folder, "model.safetensors")
    report = engine.schedule_report()
    found["report"] = sorted(report)
    found["idle"] = (0 <= report["idle_share"] < 1, report["bubble_share"])
    found["actions"] = [[action for action, _, _ in stage["actions"]] for stage in report["stages"]]
    engine.teardown()
    logging.getLogger("hf_zero").removeHandler(handler)
    found["lines"] = lines
    found["threads after"] = threading.active_count()
    return found


def run_all(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: run_pipeline(name) for name in PRECISIONS}
    found["data"] = data_and_lines(folder)
    return found


def run_all_plain() -> dict[str, Any]:
    return {name: run_plain(name) for name in PRECISIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("monitors")


@pytest.fixture(scope="module")
def pipelines(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, str(folder), timeout=120)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run_ranks(run_all_plain, 1, timeout=120)[0]


@pytest.mark.parametrize("name", PRECISIONS)
def test_it_does_what_the_plain_engine_does(pipelines: list[dict[str, Any]], plain: dict[str, Any], name: str) -> None:
    expected = plain[name]
    assert expected["losses"][0] != expected["losses"][-1]
    assert (expected["skipped"] > 0) == ("fp16" in name)
    tolerance = {"bf16": 2e-2, "fp16": 2e-3, "auto": 2e-2}.get(name[:4], 1e-5)
    for mine in (one[name] for one in pipelines):
        assert mine["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert mine["norm"] == pytest.approx(expected["norm"], rel=10 * tolerance)
        for key in ("lr", "steps", "skipped", "scale"):
            assert mine[key] == expected[key], key
        assert mine["micro"] == STEPS * MICROS * 2 // (1 if PRECISIONS[name][2] == 2 else 2)
        for key in ("last weight", "first weight"):
            if mine[key] is not None:
                torch.testing.assert_close(mine[key], expected[key], rtol=5 * tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "in place", "offload"])
def test_without_clipping_weights_have_the_same_bits(
    pipelines: list[dict[str, Any]], plain: dict[str, Any], name: str
) -> None:
    assert pipelines[0][name]["losses"] == pytest.approx(plain[name]["losses"], rel=1e-6)  # summed in another order
    assert torch.equal(pipelines[0][name]["first weight"], plain[name]["first weight"])
    assert torch.equal(pipelines[1][name]["last weight"], plain[name]["last weight"])


@pytest.mark.parametrize("name", ["fp32", "bf16 tied", "offload, one stage"])
def test_the_weights_of_all_stages_in_one_state_dict(
    pipelines: list[dict[str, Any]], plain: dict[str, Any], name: str
) -> None:
    first, last = (one[name]["state"] for one in pipelines)
    assert (first == {}) == (PRECISIONS[name][2] == 2)
    assert list(last) == list(plain[name]["state"])
    for key, value in last.items():
        torch.testing.assert_close(value, plain[name]["state"][key], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", [name for name, (_, variant, _) in PRECISIONS.items() if variant == "tied"])
def test_tied_copies_stay_equal_to_the_bit(pipelines: list[dict[str, Any]], name: str) -> None:
    assert torch.equal(pipelines[0][name]["first weight"], pipelines[1][name]["last weight"])


def test_data_of_all_sorts(pipelines: list[dict[str, Any]], folder: Path) -> None:
    first, last = (one["data"] for one in pipelines)
    assert first["loader"] == last["loader"] and len(set(first["loader"])) == 3
    assert first["order"] == last["order"] == [float(number) for number in range(8)]
    assert first["eval"] == last["eval"] and first["untouched"] and last["untouched"]
    assert first["outputs"] == (None, 0) and last["outputs"] == (MICROS, MICROS)
    assert (first["bcast"], last["bcast"]) == (False, True)
    assert first["batch_fn"] and first["repeated"] == [True, True] and list(RepeatingLoader([])) == []
    assert first["samples"] == 6 * 2 * MICROS
    assert first["parallel"] == (True, False, False)
    assert first["report"] == ["bubble_share", "idle_share", "seconds", "stages"]
    assert first["idle"] == (True, 2 / (3 * MICROS + 2))
    assert first["actions"] == [["F0", "F1", "B0", "F2", "B1", "B2"], ["F0", "B0", "F1", "B1", "F2", "I2", "W2"]]


def test_one_file_has_the_weights_of_all_stages(pipelines: list[dict[str, Any]], folder: Path) -> None:
    names = [f"{layer}.inner.{kind}" for layer in range(3) for kind in ("weight", "bias")]
    assert sorted(load_file(folder / "model.safetensors")) == sorted(names)


def test_one_rank_logs(pipelines: list[dict[str, Any]], folder: Path) -> None:
    first, last = (one["data"] for one in pipelines)
    assert sum("step=4, skipped=0" in line for line in first["lines"]) == 1
    assert any("fwd" in line for line in first["lines"])
    losses = [
        re.match(r"steps: \d loss: (\S+) iter time \(s\): \d+\.\d{3} samples/sec: \d", line) for line in first["lines"]
    ]
    assert [float(found[1]) for found in losses if found][:3] == pytest.approx(first["loader"], abs=1e-4)
    assert not any("step=" in line or "steps:" in line for line in last["lines"])
    (path,) = folder.glob("run/*loss*.csv")
    with path.open() as file:
        rows = list(csv.reader(file))
    assert [float(row[1]) for row in rows[1:4]] == pytest.approx(first["loader"])


def test_threads_are_given_back(pipelines: list[dict[str, Any]]) -> None:
    for mine in (one["data"] for one in pipelines):
        assert mine["threads after"] <= mine["threads before"]
