"""A packed base: stage 3 refuses it by name, stages 1 and 2 train adapters beside it and never touch it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf.runs import Outcome, arguments, build, entry, examples, outcome
from tests.hf.test_entries import assert_same, launch

CALLS: list[str] = []


class PackedParameter(nn.Parameter):
    """Two 4-bit numbers per byte. Casting or moving it would lose what its scale means (as in bitsandbytes)."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append("to")
        return super().to(*args, **kwargs)


class PackedLinear(nn.Module):
    """A frozen 4-bit linear layer with trainable factors beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.scale = float(base.weight.detach().abs().max()) / 7
        levels = (base.weight.detach() / self.scale).round().add(8).to(torch.uint8)
        self.weight = PackedParameter(levels[:, ::2] | levels[:, 1::2] << 4, requires_grad=False)
        self.quant_state = {"scale": self.scale}
        self.down = nn.Parameter(torch.randn(3, base.in_features) / 3)
        self.up = nn.Parameter(torch.zeros(base.out_features, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype == torch.uint8
        levels = torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1)
        return F.linear(x, (levels.to(x.dtype) - 8) * self.scale) + x @ self.down.T @ self.up.T


def packed() -> Any:
    model = build()
    model.requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.self_attn.q_proj = PackedLinear(layer.self_attn.q_proj)
    return model


def train(kind: str, stage: int, folder: str) -> Outcome:
    with entry(kind, stage) as (arguments_class, trainer_class, extra):
        model = packed()
        bits = {name: param.clone() for name, param in model.named_parameters() if param.dtype == torch.uint8}
        trainer = trainer_class(
            model=model,
            args=arguments_class(**arguments(folder, learning_rate=0.1), **extra),
            train_dataset=examples(40, 1),
        )
        CALLS.clear()
        trainer.train()
        assert kind == "ddp" or not CALLS
        for name, value in bits.items():
            param = model.get_parameter(name)
            assert isinstance(param, PackedParameter) and torch.equal(param, value), name
        return outcome(trainer, folder + "/final")


@pytest.mark.slow
def test_stages_that_keep_parameters_whole_leave_it_alone(tmp_path: Path) -> None:
    want = launch(train, "ddp", 0, str(tmp_path / "ddp"))
    for stage in (1, 2):
        got = launch(train, "subclass", stage, str(tmp_path / f"zero{stage}"))
        assert_same(got, want, label=f"stage {stage}")


def refuse(folder: str) -> list[str]:
    texts = []
    for kind in ("subclass", "enable"):
        with pytest.raises(hf_zero.ConfigError) as caught:
            train(kind, 3, folder)
        texts.append(str(caught.value))
    return texts


def test_stage_3_refuses_it_at_the_start(tmp_path: Path) -> None:
    for texts in run_ranks(refuse, 2, str(tmp_path), init_group=False):
        for text in texts:
            assert "quantized" in text and "self_attn.q_proj.weight" in text and "stage 2" in text
