"""`hf-zero config`, and what the log says of a configuration when training starts."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.config.notices import TITLE, start_text
from hf_zero.extras.cli.main import main

Capture = pytest.CaptureFixture[str]
GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_max_live_parameters": 1e9},
}


def write(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "zero3.json"
    path.write_text(json.dumps(config, indent=1))
    return str(path)


def call(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    status = main(["config", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_check_of_a_good_file(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, GOOD)
    assert call(capsys, "check", path) == (0, f"{path}: no problems (stage 3)\n", "")
    status, out, _ = call(capsys, "check", path, "--json")
    assert status == 0 and json.loads(out) == {"source": path, "stage": 3, "problems": [], "notices": []}


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "nearest"),
    [
        (7, 2, None, 8),
        (1, 2, None, 2),
        (16, 2, 3, 18),
        (10, "auto", 4, 8),
        (12, 2, 3, None),
        (7, "auto", "auto", None),
    ],
)
def test_check_finds_batch_numbers_that_fit_no_world_size(
    train: int, micro: Any, accumulation: Any, nearest: int | None, tmp_path: Path, capsys: Capture
) -> None:
    numbers = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro}
    path = write(tmp_path, GOOD | numbers | {"gradient_accumulation_steps": accumulation})
    status, out, _ = call(capsys, "check", path, "--json")
    problems = json.loads(out)["problems"]
    assert (status, [row["key"] for row in problems]) == ((1, ["train_batch_size"]) if nearest else (0, []))
    assert all(f"such as {nearest}, or leave it out" in row["remedy"] for row in problems)
    fits = [world for world in range(1, 40) if train % world == 0]  # by trying every number of ranks
    given = {key: value for key, value in {**numbers, "gradient_accumulation_steps": accumulation}.items() if value}
    if "auto" not in given.values():
        works = [world for world in fits if not ZeroConfig.load(given).problems(world_size=world)]
        assert bool(works) == (nearest is None)


def test_check_lists_all_problems_with_the_nearest_key(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, {**GOOD, "gradient_cliping": 1.0, "nebula": {"enabled": True}, "bf16": {"enabled": "yes"}})
    status, out, err = call(capsys, "check", path)
    assert status == 1
    assert 'the nearest known key is "gradient_clipping"' in out and "bf16.enabled" in out and "nebula.enabled" in out
    assert "   bf16.enabled: Train in bf16; master weights are fp32.\n" in out
    assert err == f"hf-zero config check: error: 3 problems in {path}\n"
    status, out, err = call(capsys, "check", path, "--json")
    rows = json.loads(out)["problems"]
    assert status == 1 and [row["key"] for row in rows] == ["bf16.enabled", "gradient_cliping", "nebula"]
    assert all(row["line"] and row["remedy"] for row in rows)
    assert rows[0]["help"] == "Train in bf16; master weights are fp32." and not rows[1]["help"]


@pytest.mark.parametrize("content", [None, "", "{", "[1]"])
def test_a_file_that_is_none_is_one_line(content: str | None, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "zero.json"
    if content is not None:
        path.write_text(content)
    for command in ("check", "resolve"):
        status, out, err = call(capsys, command, str(path))
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"hf-zero config {command}: error: The ZeRO configuration") and str(path) in err


def test_resolve_shows_every_value_with_its_origin(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, GOOD)
    arguments = "--gradient_accumulation_steps 2 --per_device_train_batch_size 4 --learning_rate 3e-4 --bf16".split()
    status, out, err = call(capsys, "resolve", path, *arguments, "--world_size", "3")
    assert (status, err) == (0, "")
    shown = {line.split()[0]: line.split(maxsplit=2)[2] for line in out.splitlines() if not line.startswith("note")}
    assert len(shown) > 100
    assert shown["train_batch_size"] == "24 [TrainingArguments]"
    assert shown["train_micro_batch_size_per_gpu"] == "4 [auto]"
    assert shown["bf16.enabled"] == "true [auto]"
    assert shown["optimizer.params.lr"] == "0.0003 [auto]" and shown["optimizer.type"] == '"AdamW" [file]'
    assert shown["zero_optimization.reduce_bucket_size"] == "500000000 [auto (default)]"
    assert shown["steps_per_print"] == "0 [default]"
    as_json = call(capsys, "resolve", "--world_size", "3", "--json", path, *arguments)
    values = json.loads(as_json[1])["values"]
    assert (values["train_batch_size"]["value"], values["train_batch_size"]["origin"]) == (24, "TrainingArguments")
    assert values["train_batch_size"]["help"].startswith("The number of samples of one optimizer step")
    assert set(values) == set(shown)


def test_resolve_takes_sizes_from_a_model(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "model"
    transformers.LlamaConfig(hidden_size=48, num_attention_heads=2).save_pretrained(folder)
    path = write(tmp_path, {"zero_optimization": GOOD["zero_optimization"]})
    status, out, _ = call(capsys, "resolve", path, "--model", str(folder))
    assert status == 0 and re.search(r"reduce_bucket_size \.+ 2304 \[auto\]", out)
    encoder = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 24}
    parts = (transformers.BertConfig(**encoder), transformers.BertConfig(**encoder))
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    both.architectures = ["EncoderDecoderModel"]
    both.save_pretrained(folder)
    status, out, _ = call(capsys, "resolve", path, "--model", str(folder))
    assert status == 0 and re.search(r"reduce_bucket_size \.+ 576 \[auto \(from parameters\)\]", out)
    status, out, err = call(capsys, "resolve", path, "--model", str(tmp_path / "nowhere"))
    assert (status, out, err.count("\n")) == (1, "", 1) and "--model" in err


def test_resolve_reports_conflicts_with_the_arguments(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, GOOD)
    status, out, err = call(capsys, "resolve", path, "--gradient_accumulation_steps", "4", "--max_grad_norm", "2")
    assert (
        status == 1 and "zero gradient_accumulation_steps=2 vs TrainingArguments gradient_accumulation_steps=4" in out
    )
    assert err.endswith(f"1 problem in {path}\n")


def test_resolve_for_a_plain_loop(tmp_path: Path, capsys: Capture) -> None:
    status, out, _ = call(capsys, "resolve", write(tmp_path, GOOD), "--plain")
    assert status == 1 and 'optimizer.params.lr = "auto"' in out
    assert "gradient_accumulation_steps = 2 (line 3): Either train_batch_size or train_micro_batch_size" in out
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    fixed = {**GOOD, "train_micro_batch_size_per_gpu": 1, "optimizer": adam}
    status, out, _ = call(capsys, "resolve", write(tmp_path, fixed), "--plain", "--world_size", "2")
    assert status == 0 and re.search(r"train_batch_size \.+ 4 \[inferred\]", out)
    assert re.search(r"gradient_clipping \.+ 0.0 \[default\]", out) and "note:" not in out
    status, out, _ = call(capsys, "resolve", write(tmp_path, {**fixed, "gradient_clipping": "auto"}), "--plain")
    assert status == 0 and re.search(r"gradient_clipping \.+ 1.0 \[auto \(accelerate's value: no max_grad_norm", out)
    assert 'note: gradient_clipping = "auto" is 1.0 here' in out and "0 for none" in out


@pytest.mark.parametrize(
    "rest", [["--learning_rat", "1"], ["--learning_rate", "fast"], ["--world_size", "0"], ["--world_size", "two"]]
)
def test_bad_usage_is_status_2(rest: list[str], tmp_path: Path, capsys: Capture) -> None:
    status, out, err = call(capsys, "resolve", write(tmp_path, GOOD), *rest)
    assert (status, out, err.count("\n")) == (2, "", 1) and "(see hf-zero config resolve --help)" in err


# -------------------------------------------------------------------- the log at the start
def test_the_start_text_has_every_key_and_the_users_json() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-8, "betas": [0.9, 0.95]}}
    raw = {**GOOD, "train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "_comment": "mine"}
    resolved = ZeroConfig.load(raw).resolve()
    text = start_text(resolved)
    values, _, given = text.partition("\n  json = ")
    assert json.loads(given) == raw
    lines = values.splitlines()
    assert lines[0].startswith(TITLE)
    keys = [re.fullmatch(r"  ([\w.]+) \.+ (.+) \[[\w ()]+\]", line) for line in lines[1:]]
    assert all(keys) and len(keys) == len(resolved.settings) > 60


@pytest.mark.parametrize(
    ("level", "dump", "shown"), [("DEBUG", False, 1), ("WARNING", False, 0), ("WARNING", True, 1)]
)
def test_the_engine_logs_its_configuration_once(
    level: str, dump: bool, shown: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(getattr(logging, level), logger="hf_zero")
    caplog.handler.setLevel(logging.INFO)  # what dump_state asks for is shown at any level of the others
    model = torch.nn.Linear(4, 4)
    config = {"zero_optimization": {"stage": 2}, "dump_state": dump}
    engine, *_ = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    found = [record for record in caplog.records if record.getMessage().startswith(TITLE)]
    assert len(found) == shown
    if found:
        assert found[0].name == ("hf_zero.lines" if dump else "hf_zero.engine.engine")
        text = found[0].getMessage()
        assert json.loads(text.partition("\n  json = ")[2]) == config
        assert len(re.findall(r"^  [\w.]+ \.+ ", text, re.MULTILINE)) > 60
    engine.teardown()
