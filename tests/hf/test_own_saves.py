"""Trainers with a `_save` or a `save_model` of their own: full weights come to them as under DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf.runs import arguments, build, entry, examples


class Own(transformers.Trainer):
    """Notes where it saves, and writes weights in its own way."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        assert output_dir is not None
        Path(output_dir).mkdir(exist_ok=True)
        Path(output_dir, f"came-{self.args.process_index}").touch()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        assert output_dir is not None
        os.makedirs(output_dir, exist_ok=True)
        torch.save(state_dict, Path(output_dir, f"weights-{self.args.process_index}.pt"))


def save(kind: str, stage: int, folder: str) -> None:
    with entry(kind, stage) as (arguments_class, _, extra):
        mixed: Any = Own if kind == "enable" else type("Mixed", (hf_zero.ZeroTrainerMixin, Own), {})
        args = arguments_class(**arguments(folder, max_steps=1, save_strategy="steps", save_steps=1), **extra)
        trainer = mixed(model=build(), args=args, train_dataset=examples(8, 1))
        trainer.train()
        trainer.save_model(f"{folder}/end")


@pytest.mark.parametrize(("kind", "stage"), [("subclass", 3), ("enable", 3), ("enable", 2)])
def test_weights_come_to_the_method_of_a_subclass(kind: str, stage: int, tmp_path: Path) -> None:
    run_ranks(save, 2, kind, stage, str(tmp_path), init_group=False)
    want = build().state_dict()
    for folder in (tmp_path / "checkpoint-1", tmp_path / "end"):
        assert sorted(path.name for path in folder.glob("[cw]*-?*")) == ["came-0", "came-1", "weights-0.pt"]
        weights = torch.load(folder / "weights-0.pt", weights_only=False)
        assert {name: value.shape for name, value in weights.items()} == {n: v.shape for n, v in want.items()}
        assert all(value.isfinite().all() for value in weights.values())
