"""A pipeline of a transformers model: trains as the model does in one process, and becomes one again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

import hf_zero
from hf_zero.extras.cli.main import main
from tests.harness.ranks import run_ranks

WORDS, MICROS, STEPS = 40, 3, 3
# The gradient of a key's bias is zero but for rounding, of which a small eps would make whole steps.
ADAM = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-4}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIGS = {
    "smollm2": LlamaConfig(**SIZES, vocab_size=WORDS, num_key_value_heads=1, tie_word_embeddings=True),
    "gpt_neox": GPTNeoXConfig(**SIZES, vocab_size=WORDS),
}


def micros(step: int) -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """((ids, attention mask), labels) of another length each step, padded on the right."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(MICROS):
        ids = torch.randint(WORDS, (2, 6 + step), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        found.append(((ids, mask), ids.masked_fill(mask == 0, -100)))
    return found


def train_pipelines(folder: str) -> dict[str, Any]:
    found = {}
    for kind in CONFIGS:
        module = hf_zero.pipeline.from_transformers(
            str(Path(folder, kind)), 2, model_kwargs={"attn_implementation": "eager"}
        )
        engine, *_ = hf_zero.initialize(
            model=module,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICROS,
                "optimizer": {"type": "AdamW", "params": ADAM},
                "gradient_clipping": 1.0,
            },
        )
        losses = []
        for step in range(STEPS):
            data = [((ids, mask, mask.cumsum(1) - 1), labels) for (ids, mask), labels in micros(step)]
            losses.append(engine.train_batch(iter(data)).item())
        engine.save_checkpoint(str(Path(folder, f"{kind}-trained")), tag="last")
        found[kind] = (losses, module.load_report.bytes_read)
        engine.teardown()
    return found


def train_alone(folder: Path, kind: str) -> tuple[list[float], Any]:
    model = AutoModelForCausalLM.from_pretrained(folder / kind, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for (ids, mask), labels in micros(step):
            out = model(input_ids=ids, attention_mask=mask, position_ids=mask.cumsum(1) - 1, labels=labels)
            (out.loss / MICROS).backward()
            total += out.loss.item() / MICROS
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("models")
    for kind, config in CONFIGS.items():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
    return folder, run_ranks(train_pipelines, 2, str(folder))


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_trains_as_the_model_does(trained: tuple[Path, list[dict[str, Any]]], kind: str) -> None:
    folder, by_rank = trained
    losses, model = train_alone(folder, kind)
    assert abs(losses[0] - losses[-1]) > 1e-3
    stored = (folder / kind / "model.safetensors").stat().st_size
    for mine in by_rank:
        assert mine[kind][0] == pytest.approx(losses, rel=1e-5)
        assert 0 < mine[kind][1] < 0.9 * stored  # of its own stage
    # Consolidated with the model's own names, transformers loads what was trained.
    checkpoint = folder / f"{kind}-trained/last"
    assert main(["consolidate", str(checkpoint), "--names", str(checkpoint / "original_names.json")]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint / "consolidated", attn_implementation="eager").eval()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-4, atol=1e-5)
