"""`hf-zero estimate --plot` and `hf-zero inspect --plot`: their pages in a browser, beside what the commands say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from hf_zero.extras.cli.main import main
from tests.conversion.test_from_deepspeed import DATA
from tests.harness.browser import check_stacks, check_tables, colours_in, look_at

Capture = pytest.CaptureFixture[str]


def test_a_plan_as_a_page(tmp_path: Path, capsys: Capture) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=500, max_position_embeddings=64)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    hardware = ["--gpus", "2", "--gpu-memory", "2.15GB", "--json"]
    assert main(["estimate", str(tmp_path), *hardware, "--plot", str(tmp_path / "plan.html")]) == 0
    answer = json.loads(capsys.readouterr().out)
    seen = look_at(tmp_path / "plan.html", tmp_path)
    check_tables(seen)
    check_stacks(seen)
    (figures, _), *_ = seen.sections("table")
    assert [row[1] for row in figures["rows"]] == [choice["device_bytes"] for choice in answer["choices"]]
    fits = ["yes" if choice["fits"] else "too large" for choice in answer["choices"]]
    assert [row[4] for row in figures["rows"]] == fits and len(set(fits)) == 2
    (device, drawn), *_ = seen.sections("stacks")
    assert [row["parts"] for row in device["rows"]] == [choice["device"] for choice in answer["choices"]]
    assert [line.text for line in drawn.all("text", **{"class": "soft limit"})] == [
        "limit 42.5 MB"
    ]  # 5 % and 2 GB are left
    assert min(colours_in(seen.image)) > 20


def test_a_checkpoint_as_a_page(tmp_path: Path, capsys: Capture) -> None:
    assert main(["convert", "from-deepspeed", str(DATA / "stage2"), str(tmp_path / "made")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "made"), "--json", "--plot", str(tmp_path / "made.html")]) == 0
    summary = json.loads(capsys.readouterr().out)
    seen = look_at(tmp_path / "made.html", tmp_path)
    check_tables(seen)
    check_stacks(seen)
    files, units = (section for section, _ in seen.sections("stacks"))
    assert {row["name"]: sum(row["parts"].values()) for row in files["rows"]} == {
        file["name"]: file["size"] for file in summary["files"]
    }
    masters = sum(row["parts"].get("master", 0) for row in units["rows"])
    assert masters == 4 * summary["trainable_parameters"] > 0
    assert colours_in(seen.image)[0] > 20


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["convert", "from-deepspeed", str(DATA / "stage2"), str(tmp_path / "made")]) == 0
    assert main(["inspect", str(tmp_path / "made"), "--plot", str(tmp_path / "file" / "page.html")]) == 1
    assert "cannot write" in capsys.readouterr().err
