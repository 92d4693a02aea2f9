"""Somebody who knows another tool writes its words here, and gets a sentence with ours."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.errors import ConfigError

EXAMPLE = '{"zero_optimization": {"stage": 3}}'


def arguments(folder: Path, **kwargs: Any) -> Any:
    return hf_zero.TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **kwargs)


def test_deepspeed_in_the_place_of_zero(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Write zero='zero3\.json' instead of deepspeed='zero3\.json'"):
        arguments(tmp_path, deepspeed="zero3.json")
    parser: Any = transformers.HfArgumentParser(hf_zero.Seq2SeqTrainingArguments)
    with pytest.raises(ConfigError, match="--zero instead of --deepspeed"):
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--deepspeed", "zero3.json"])


@pytest.mark.parametrize("given", [3, "stage3", "3", b"{}"])
def test_a_stage_in_the_place_of_a_configuration(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        arguments(tmp_path, zero=given)
    assert EXAMPLE in str(caught.value) and str(given) in str(caught.value)


@pytest.mark.parametrize("given", [{"stage": 3}, {"zero_stage": 2, "config": EXAMPLE}, {}])
def test_keys_in_the_place_of_the_plugins_configuration(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        hf_zero.ZeroPlugin(**given)
    assert f"ZeroPlugin({EXAMPLE})" in str(caught.value)
    assert all(name in str(caught.value) for name in given if name != "config")


def test_a_trainer_without_zero_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    hf_zero.Trainer(model=model, args=arguments(tmp_path))
    assert [record.levelname for record in caplog.records if "trains without ZeRO" in record.message] == ["WARNING"]
    caplog.clear()
    hf_zero.Trainer(model=model, args=arguments(tmp_path, zero=EXAMPLE))
    transformers.Trainer(model=model, args=transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    assert "without ZeRO" not in caplog.text


def test_log_level_of_the_arguments_is_hf_zeros(tmp_path: Path) -> None:
    logger = logging.getLogger("hf_zero")
    before = logger.level
    try:
        hf_zero.Trainer(model=torch.nn.Linear(2, 2), args=arguments(tmp_path, zero=EXAMPLE))
        assert logger.level == before
        hf_zero.Trainer(model=torch.nn.Linear(2, 2), args=arguments(tmp_path, zero=EXAMPLE, log_level="info"))
        assert logger.level == logging.INFO
    finally:
        hf_zero.set_verbosity(before)
        logging.getLogger("hf_zero.start").setLevel(logging.INFO)
