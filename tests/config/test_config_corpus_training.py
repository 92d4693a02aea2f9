"""Three steps of training with every public configuration that the resolver takes, on a model that is tiny.

What is refused is decided by the resolver when the test runs, so a feature that is announced is trained with at once.
All configurations run in the same two processes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.config.parse import look_up
from hf_zero.errors import ConfigError
from tests.config.test_config_corpus import FILES, INLINE, arguments_for
from tests.harness import models
from tests.harness.ranks import run_ranks

STEPS = 3


def raw_configurations() -> dict[str, dict[str, Any]]:
    """Return configurations by name: the public ones, and a few of the same kinds."""
    found = {name: ZeroConfig.load(text).raw for name, (text, _) in INLINE.items()}
    for path in FILES:
        try:
            found[path.stem] = ZeroConfig.load(path, defer=True).raw
        except ConfigError:  # a template
            continue
    return found


def scaled(raw: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """The resolved configuration for two ranks and a tiny model, or None where it is refused.

    Batches and thresholds shrink and rates grow, so that three steps move weights; paths lead into `folder`.
    """
    loaded = ZeroConfig.load(raw, defer=True)
    if loaded.problems(arguments_for(loaded.raw)):
        return None
    config = loaded.resolve(arguments_for(loaded.raw)).to_dict()
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        config.pop(key, None)
    config |= {"train_micro_batch_size_per_gpu": 2, "desync_timeout": 30.0}
    config["gradient_accumulation_steps"] = min(2, config["gradient_accumulation_steps"])
    zero = config["zero_optimization"]
    zero["stage3_param_persistence_threshold"] = min(40, zero["stage3_param_persistence_threshold"])
    for block in ("offload_param", "offload_optimizer"):
        if zero[block]["device"] == "nvme":
            zero[block]["nvme_path"] = folder
    if look_up(config, "fp16.enabled"):
        config["fp16"]["initial_scale_power"] = 4
    if "lr" in look_up(config, "optimizer.params", {}):
        config["optimizer"]["params"]["lr"] = 1e-2
    schedule = look_up(config, "scheduler.params", {})
    for name in ("warmup_num_steps", "warmup_max_lr"):
        if name in schedule:
            schedule[name] = {"warmup_num_steps": 2, "warmup_max_lr": 1e-2}[name]
    return config


def train_with(name: str, config: dict[str, Any]) -> dict[str, Any]:
    model = models.build("plain")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS * config["gradient_accumulation_steps"]):
        loss = engine(**models.make_batch("plain", seed=step, rank=engine.rank))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.finish_updates()
    after = engine.full_state_dict(keep=True)
    moved = max((after[key].float() - before[key].float()).abs().max().item() for key in before)
    steps = engine.global_steps
    stage = engine.config.stage
    engine.teardown()
    return {"losses": losses, "moved": moved, "steps": steps, "stage": stage}


def train_all(configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    results = {}
    for name, config in configs.items():
        try:
            results[name] = train_with(name, copy.deepcopy(config))
        except Exception as error:
            raise RuntimeError(f"with the configuration {name}: {error}") from error
    return results


@pytest.mark.slow
def test_every_configuration_that_is_taken_trains(tmp_path: Path) -> None:
    found = {name: scaled(raw, str(tmp_path)) for name, raw in raw_configurations().items()}
    taken = {name: config for name, config in found.items() if config is not None}
    assert len(taken) >= 48
    outcomes = run_ranks(train_all, 2, taken, timeout=170)
    for name in taken:
        for result in (outcome[name] for outcome in outcomes):
            assert result["steps"] == STEPS, name
            assert all(torch.isfinite(torch.tensor(result["losses"]))), name
            assert result["moved"] > 1e-4, name
    stages = {result["stage"] for result in outcomes[0].values()}
    assert stages == {0, 1, 2, 3}
