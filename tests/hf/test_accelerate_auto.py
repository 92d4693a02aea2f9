""" "auto" in a plain accelerate loop: what the Accelerator and its loaders say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hf_zero import ZeroConfig, ZeroPlugin
from hf_zero.engine.engine import engine_of
from hf_zero.errors import ConfigError

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO: dict[str, Any] = {
    **dict.fromkeys(BATCH, "auto"),
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


def prepared(config: dict[str, Any], *sizes: int, **accelerator: Any) -> tuple[Accelerator, dict[str, Any]]:
    """The Accelerator after preparing a model with loaders of these batch sizes, and what the engine was given."""
    AcceleratorState._reset_state(reset_partial_state=True)
    made = Accelerator(cpu=True, **accelerator)
    ZeroPlugin(config).attach(made)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    data = TensorDataset(torch.zeros(24, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loaders = [DataLoader(data, batch_size=size) for size in sizes]
    model, *_ = made.prepare(model, optimizer, *loaders)
    engine = engine_of(model)
    assert engine is not None
    engine.teardown()
    return made, {**engine.config.settings, "dtype": engine.config.dtype, "origins": engine.config.origins}


def test_auto_is_filled_from_the_accelerator_and_its_loaders() -> None:
    _, values = prepared(AUTO, 6, 4, gradient_accumulation_steps=3, mixed_precision="bf16")
    assert [values[key] for key in BATCH] == [12, 4, 3]  # the smallest loader, as accelerate takes it
    assert values["gradient_clipping"] == 1.0 and values["dtype"] == "bfloat16"
    assert values["zero_optimization.reduce_bucket_size"] == 36
    assert {values["origins"][key] for key in BATCH} == {"auto"}


def test_the_configuration_is_resolved_when_it_is_attached_and_when_the_model_is_known() -> None:
    models = []
    resolve = ZeroConfig.resolve

    def noted(config: ZeroConfig, args: Any = None, model: Any = None, *others: Any, **brought: Any) -> Any:
        models.append(model)
        return resolve(config, args, model, *others, **brought)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZeroConfig, "resolve", noted)
        prepared({**AUTO, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, 4)
    assert [model is not None for model in models] == [False, True]


def test_missing_batch_numbers_follow_the_loader_too() -> None:
    _, values = prepared({"zero_optimization": {"stage": 1}}, 5)
    assert [values[key] for key in BATCH] == [5, 5, 1]
    _, values = prepared({"zero_optimization": {"stage": 1}})
    assert [values[key] for key in BATCH] == [1, 1, 1]


def test_numbers_of_the_file_stand() -> None:
    _, values = prepared({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}, 5)
    assert values["train_micro_batch_size_per_gpu"] == 2


def test_accumulation_of_the_file_reaches_the_accelerator(caplog: pytest.LogCaptureFixture) -> None:
    accelerator, values = prepared({"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}, 2)
    assert accelerator.gradient_accumulation_steps == values["gradient_accumulation_steps"] == 4
    assert "accumulates 4 times, as configured" in caplog.text
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=4"):
        prepared({"gradient_accumulation_steps": 4}, 2, gradient_accumulation_steps=3)
