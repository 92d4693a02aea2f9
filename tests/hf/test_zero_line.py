"""One line of rank 0's log says that ZeRO is on, at the default levels of Python and transformers."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf.runs import _tokenizer as tokenizer
from tests.hf.runs import build, examples, zero_config

LINE = "hf_zero: ZeRO stage {} over 2 ranks on cpu, {}"


def trained(entry: str, stage: int, folder: str, silent: bool = False, **blocks: Any) -> list[str]:
    """Return the lines of this rank's standard error that name ZeRO, of a run with an evaluation before and
    after it.
    """
    if silent:
        logging.getLogger("hf_zero.start").setLevel("WARNING")
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        _train(entry, zero_config(stage, **blocks), folder)
    return [line for line in out.getvalue().splitlines() if "ZeRO" in line]


def _train(entry: str, config: dict[str, Any], folder: str) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    settings |= {"per_device_train_batch_size": 1, "output_dir": folder, "use_cpu": True}
    rows = [{key: row[key] for key in ("input_ids", "labels")} for row in examples(4, 1)]
    if entry == "trainer":
        args = hf_zero.TrainingArguments(zero=config, bf16=config.get("bf16") is not None, **settings)
        trainer = hf_zero.Trainer(model=build(), args=args, train_dataset=rows, eval_dataset=rows[:2])
        trainer.evaluate()
        trainer.train()
        trainer.evaluate()
        trainer.train()
    elif entry == "trl":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        hf_zero.enable(config)
        sft = SFTConfig(bf16=False, dataset_kwargs={"skip_prepare_dataset": True}, **settings)
        data = Dataset.from_list(rows)
        SFTTrainer(model=build(), args=sft, train_dataset=data, processing_class=tokenizer()).train()
    else:
        model, config = build(), {**config, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0}
        optimizer: Any = torch.optim.AdamW(model.parameters())
        batch = {key: torch.tensor([value]) for key, value in rows[0].items()}
        if entry == "accelerate":
            accelerator = hf_zero.ZeroPlugin(config).attach(Accelerator(cpu=True))
            model, optimizer = accelerator.prepare(model, optimizer)
            accelerator.backward(model(**batch).loss)
            optimizer.step()
        else:
            engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
            engine.backward(engine(**batch).loss)
            engine.step()
            hf_zero.shard(build(), config)  # a reference: it does not train


@pytest.mark.parametrize("entry", ["trainer", "trl", "accelerate", "initialize"])
def test_zero_is_on_is_said_once(entry: str, tmp_path: Any) -> None:
    stage = 1 if entry == "initialize" else 3
    first, second = run_ranks(trained, 2, entry, stage, str(tmp_path), init_group=False, timeout=90)
    assert len(first) == 1 and first[0].endswith(LINE.format(stage, "fp32")), first
    assert second == []


def test_a_model_without_large_parameters_is_not_called_sharded(tmp_path: Path) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 10**6}
    first, _ = run_ranks(trained, 2, "initialize", 3, str(tmp_path), init_group=False, zero_optimization=zero)
    assert len(first) == 1
    assert first[0].endswith("no parameter sharded: all are smaller than stage3_param_persistence_threshold")


def test_what_the_line_names_and_how_to_silence_it(tmp_path: Any) -> None:
    offload: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    offload["stage3_param_persistence_threshold"] = 0  # every parameter of the small model is sharded
    blocks: dict[str, Any] = {"zero_optimization": offload, "bf16": {"enabled": "auto"}}
    first, _ = run_ranks(trained, 2, "trainer", 3, str(tmp_path), init_group=False, timeout=90, **blocks)
    assert len(first) == 1 and first[0].endswith(LINE.format(3, "bf16, optimizer on cpu, parameters on cpu")), first
    assert run_ranks(trained, 2, "initialize", 1, str(tmp_path), True, init_group=False) == [[], []]
