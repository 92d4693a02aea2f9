"""The two configurations of a tutorial that have an activation_checkpointing block, as they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.extras.activations import active
from tests.harness.ranks import run_ranks

DOCUMENTS = Path(__file__).resolve().parents[1] / "data" / "document_configs"
NAMES = ("10.txt", "12.txt")  # zero_r_config.json, zero_off_config.json
BLOCK = "activation_checkpointing"
STEPS = 3


def losses(config: dict[str, Any], is_reentrant: bool) -> list[float]:
    """Return the losses of a run with dropout."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=40, n_positions=16))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    torch.manual_seed(1 + engine.rank)
    found, live = [], 0
    for step in range(STEPS):
        ids = (torch.arange(16).view(2, 8) * (step + 2) + engine.rank) % 40
        loss = engine(input_ids=ids, labels=ids).loss
        if (now := active.current()) is not None:
            live = now.saved.num_live
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    assert live == (4 if BLOCK in config else 0), live
    engine.teardown()
    return found


def train() -> list[Any]:
    results = []
    for number, name in enumerate(NAMES):
        config = ZeroConfig.load((DOCUMENTS / name).read_text(encoding="utf-8")).raw
        assert config[BLOCK]["number_checkpoints"] == 4
        for low in (False, True):  # as they stand; and with a scale at which the first steps count
            if low:
                config["fp16"]["initial_scale_power"] = 4
            without = {key: value for key, value in config.items() if key != BLOCK}
            results.append([losses(one, number == 0) for one in (config, without)])
    return results


def test_losses_are_those_without_the_block() -> None:
    for results in run_ranks(train, 2):
        for found, expected in results:
            assert found == expected and len(set(found)) == STEPS
