"""Models and Trainers of libraries that save and load part by part, as those of sentence-transformers do."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaModel

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf.runs import VOCAB, arguments, build, entry, examples, zero_config


class Parts(nn.Module):
    """An encoder of transformers, and a head; neither `save_pretrained` nor `load` knows a state dict."""

    def __init__(self, encoder: LlamaModel) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **more: Any) -> dict[str, Any]:
        logits = self.head(self.encoder(input_ids, **more).last_hidden_state)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}

    def save_pretrained(self, path: str) -> None:
        self.encoder.save_pretrained(path)
        safetensors.torch.save_model(self.head, f"{path}/head.safetensors")
        with torch.inference_mode():  # for a page about the model
            sample = self(torch.arange(8)[None])["logits"].sum().item()
        Path(path, "sample.json").write_text(json.dumps(sample))

    @classmethod
    def load(cls, path: str) -> Parts:
        model = cls(LlamaModel.from_pretrained(path))
        safetensors.torch.load_model(model.head, f"{path}/head.safetensors")
        return model


class Wrapped(Parts):
    """Hands the arguments of `save_pretrained` on to its encoder, whatever they are: FlagEmbedding's rerankers do."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        self.encoder.save_pretrained(*args, **kwargs)


class PartsTrainer(transformers.Trainer):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert output_dir is not None and isinstance(self.model, Parts)
        self.model.save_pretrained(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        assert isinstance(self.model, Parts)
        self.model.load_state_dict(Parts.load(resume_from_checkpoint).state_dict())

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)


class OtherTrainer(PartsTrainer):
    """Saves from `save_model` itself, and comes to the methods of transformers for other models only: GLiNER's way."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            self._save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if isinstance(self.model, Parts):
            self.model.load_state_dict(Parts.load(resume_from_checkpoint).state_dict())
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)


class NotingTrainer(PartsTrainer):
    """Loads as transformers does, and does something of its own besides."""

    def _load_best_model(self) -> None:
        transformers.Trainer._load_best_model(self)
        self.noted = True


@dataclasses.dataclass
class Found:
    """The losses of a run, and the numbers that its samples show, by folder."""

    losses: list[float]
    resumed: list[float]
    samples: dict[str, float]
    best: dict[str, torch.Tensor]


def make() -> Parts:
    encoder = build().model
    torch.manual_seed(3)
    return Parts(encoder)


def losses_of(trainer: transformers.Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def train(kind: str, stage: int, folder: str, trainer_class: type[PartsTrainer] = PartsTrainer) -> Found:
    with entry(kind, stage) as (_, _, more):
        saves = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 4}
        # The largest loss is that of the first evaluation: another checkpoint than the last is the best one.
        best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
        args = transformers.TrainingArguments(**arguments(folder, **saves, **best, **more))
        data: dict[str, Any] = {"train_dataset": examples(40, 1), "eval_dataset": examples(9, 2)}
        trainer = trainer_class(model=make(), args=args, **data)
        trainer.train()
        assert getattr(trainer, "noted", False) == isinstance(trainer, NotingTrainer)
        assert isinstance(trainer.model, Parts)
        if kind != "ddp" or args.process_index == 0:
            trainer.model.save_pretrained(f"{folder}/final")
        again = trainer_class(model=make(), args=args, **data)
        if kind != "ddp":  # transformers 5.6 cannot resume on CPUs by itself
            again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        trainer.accelerator.wait_for_everyone()
        found = {str(path.parent.name): json.loads(path.read_text()) for path in Path(folder).glob("*/sample.json")}
        weights = safetensors.torch.load_file(f"{folder}/final/model.safetensors")
        weights |= safetensors.torch.load_file(f"{folder}/final/head.safetensors")
        return Found(losses_of(trainer), losses_of(again)[-2:], found, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "trainer_class"), [(2, PartsTrainer), (3, PartsTrainer), (3, OtherTrainer), (3, NotingTrainer)]
)
def test_a_library_saves_and_loads_in_its_own_way(
    stage: int, trainer_class: type[PartsTrainer], tmp_path: Path
) -> None:
    wanted = run_ranks(train, 2, "ddp", 0, str(tmp_path / "ddp"), timeout=90, init_group=False)[0]
    assert wanted.losses[0] > wanted.losses[-1] and len(wanted.samples) == 3
    assert wanted.samples["final"] == wanted.samples["checkpoint-2"] != wanted.samples["checkpoint-4"]
    job = "enable", stage, str(tmp_path / "zero"), trainer_class
    for found in run_ranks(train, 2, *job, timeout=90, init_group=False):
        assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
        assert found.resumed == found.losses[-2:]
        assert found.samples == pytest.approx(wanted.samples, rel=1e-4)
        torch.testing.assert_close(found.best, wanted.best, rtol=1e-4, atol=1e-6)


def save_wrapped(folder: str) -> None:
    model = Wrapped(build().model)
    want = {name: tensor.clone() for name, tensor in model.encoder.state_dict().items()}
    hf_zero.initialize(
        model=model, config=zero_config(3) | {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
    )
    model.save_pretrained(folder)
    torch.testing.assert_close(safetensors.torch.load_file(f"{folder}/model.safetensors"), want, rtol=0, atol=0)


def test_a_model_that_saves_a_part_of_it_saves_that_part_under_its_own_names(tmp_path: Path) -> None:
    run_ranks(save_wrapped, 2, str(tmp_path))


class Holder(nn.Module):
    """A user's own model around one of transformers; it has no `save_pretrained`."""

    def __init__(self, adapters: bool) -> None:
        super().__init__()
        self.language = get_peft_model(build(), LoraConfig(target_modules=["q_proj"])) if adapters else build()
        self.register_buffer("scale", torch.tensor(2.0))
        self.head = nn.Linear(VOCAB, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scale * self.head(self.language(ids).logits)


def save_part(folder: str, adapters: bool) -> None:
    model = Holder(adapters)
    config = zero_config(3) | {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.arange(8)[None] + engine.rank).square().mean())
    engine.step()
    model.language.save_pretrained(f"{folder}/all")
    with hf_zero.gathered_params(model.language):
        if engine.rank == 0:  # as programs for DeepSpeed do
            model.language.save_pretrained(f"{folder}/gathered")
    engine.teardown()
    if engine.rank == 0:
        model.language.save_pretrained(f"{folder}/plain")


@pytest.mark.parametrize("adapters", [False, True])
def test_a_module_inside_the_engines_model_is_saved_by_all_ranks_as_it_would_be_unsharded(
    adapters: bool, tmp_path: Path
) -> None:
    run_ranks(save_part, 2, str(tmp_path), adapters)
    file = "adapter_model.safetensors" if adapters else "model.safetensors"
    plain = safetensors.torch.load_file(tmp_path / "plain" / file)
    for folder in ("all", "gathered"):
        assert sorted(os.listdir(tmp_path / folder)) == sorted(os.listdir(tmp_path / "plain"))
        torch.testing.assert_close(safetensors.torch.load_file(tmp_path / folder / file), plain, rtol=0, atol=0)
    start = Holder(adapters).language.state_dict()
    assert any(
        not torch.equal(value, start[key.replace(".weight", ".default.weight") if adapters else key])
        for key, value in plain.items()
    )


def save_while_holding_all_weights(folder: str, adapters: bool) -> None:
    model = Holder(adapters).language
    config = zero_config(3) | {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
    engine = hf_zero.initialize(model=model, config=config)[0]
    state = engine._consolidated_16bit_state_dict()
    if engine.rank == 0:
        model.save_pretrained(f"{folder}/alone")
    del state
    model.save_pretrained(f"{folder}/all")


@pytest.mark.parametrize("adapters", [False, True])
def test_one_rank_may_save_alone_while_its_program_holds_all_weights(adapters: bool, tmp_path: Path) -> None:
    run_ranks(save_while_holding_all_weights, 2, str(tmp_path), adapters)
    file = "adapter_model.safetensors" if adapters else "model.safetensors"
    alone, everyone = (safetensors.torch.load_file(tmp_path / folder / file) for folder in ("alone", "all"))
    assert alone
    torch.testing.assert_close(alone, everyone, rtol=0, atol=0)


def fail_to_save(folder: str) -> None:
    config = zero_config(3) | {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
    model = make()
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)[0]
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = engine(ids)["logits"]
    Path(folder, "taken").touch()
    with pytest.raises(hf_zero.CheckpointError, match=r"rank 0: cannot write .*taken"):
        model.save_pretrained(f"{folder}/taken")
    assert "sharded" in repr(model.head.weight)
    with torch.no_grad():
        assert torch.equal(engine(ids)["logits"], before)
    model.save_pretrained(f"{folder}/free")


def test_a_save_that_fails_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    run_ranks(fail_to_save, 2, str(tmp_path))
    assert json.loads(Path(tmp_path, "free", "sample.json").read_text()) != 0
