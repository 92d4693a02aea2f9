"""The recipe of translation, run as a user would: equal losses, three ways to weights, answers of ZeRO inference."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_zero import ZeroConfig
from recipes.translation.pairs import load_pairs
from recipes.translation.report import PARTS, RUNS, losses_of
from tests.harness import in_memory
from tests.harness.scripts import Ran, run_hf_zero, run_script

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "translation"
STEPS = 6
TRAINING = f"""--do_train --max_steps {STEPS} --learning_rate 3e-3 --warmup_steps 1
    --max_train_samples 64 --max_source_length 16 --max_target_length 16 --logging_steps 1 --use_cpu True
    --report_to none --disable_tqdm True""".split()
tmp_path_factory = in_memory.tmp_path_factory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model in it."""
    folder = tmp_path_factory.mktemp("translation")
    sizes = "--d_model 32 --num_layers 1 --vocab_size 500".split()
    ran = run_script(RECIPE / "small.py", "small", *sizes, folder=folder, processes=1)
    assert ran.status == [0], ran.err
    return folder


def run(name: str, *more: object, folder: Path, processes: int = 2) -> Ran:
    arguments = ["--model_name_or_path", "small", "--output_dir", name, *TRAINING, *more]
    ran = run_script(RECIPE / "run_translation.py", *arguments, folder=folder, processes=processes)
    assert set(ran.status) == {0}, ran.err
    return ran


def test_sentences_are_split_in_disjoint_parts() -> None:
    train, held_out = load_pairs("en", "ro")
    assert len(train) > 2000 and 100 < len(held_out) < 400
    assert not {pair["en"] for pair in train} & {pair["en"] for pair in held_out}
    assert {
        "en": "Enter a valid email address.",
        "ro": "Introduce\u021bi o adres\u0103 de email valid\u0103.",
    } in train
    assert load_pairs("ro", "en")[0] == train and load_pairs("de", "fr")[0][0].keys() == {"de", "fr"}
    with pytest.raises(SystemExit, match="no sentences in both 'en' and 'xx'"):
        load_pairs("en", "xx")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_files_are_complete_configurations(stage: int) -> None:
    config = ZeroConfig.load(str(RECIPE / f"ds_config_zero{stage}.json"))
    assert config.check() == [] and config.stage == stage


@pytest.mark.slow
def test_every_run_has_the_losses_of_transformers(folder: Path) -> None:
    runs = {"plain": (1, None), "zero2-one": (1, 2), "zero0": (2, 0), "zero2": (2, 2), "zero3": (2, 3)}
    assert runs.keys() < RUNS.keys()
    for name, (processes, stage) in runs.items():
        zero = [] if stage is None else ["--zero", RECIPE / f"ds_config_zero{stage}.json"]
        sizes = ["--per_device_train_batch_size", 8 // processes, "--save_strategy", "no", "--dtype", "float64"]
        run(name, *sizes, *zero, folder=folder, processes=processes)
    losses = {name: losses_of(folder / name) for name in runs}
    assert losses["plain"][-1] < losses["plain"][0] - 0.3, "the reference did not learn"
    for name, own in losses.items():
        np.testing.assert_allclose(own, losses["plain"], atol=2e-6, err_msg=name)  # They are logged in fp32.


@pytest.mark.slow
def test_weights_come_in_three_ways(folder: Path) -> None:
    zero = ["--zero", RECIPE / "ds_config_zero3.json", "--fp16", "--fp32_dir", "online"]
    run("saved", *zero, "--per_device_train_batch_size", 4, folder=folder)
    checkpoint = folder / "saved" / f"checkpoint-{STEPS}"
    done = run_hf_zero("consolidate", checkpoint, "offline.safetensors", folder=folder)
    assert done.status == [0], done.err
    subprocess.run([sys.executable, "zero_to_fp32.py", ".", "../offline"], cwd=checkpoint, check=True)
    paths = ["offline.safetensors", "online", "saved/offline/pytorch_model.bin", "saved", checkpoint]
    ran = run_script(RECIPE / "weights.py", *paths, folder=folder, processes=1)
    assert ran.status == [0], ran.err
    first, online, script, *sixteen_bits = ran.out.splitlines()
    for line in (first, online, script):
        assert re.search(r"\{'float32': \d+\}, (\d+) of \1 tensors, largest difference 0, the same", line), ran.out
    for line in sixteen_bits:
        assert "'float16'" in line and ", the same after rounding" in line, ran.out


@pytest.mark.slow
def test_scores_translations_and_answers(folder: Path) -> None:
    """The model evaluates under ZeRO without training; then each rank answers a text of its own."""
    zero = ["--zero", RECIPE / "ds_config_zero3.json", "--do_eval", "--predict_with_generate", "--max_eval_samples", 6]
    arguments = ["--model_name_or_path", "small", "--output_dir", "evaluated", "--use_cpu", "True", *zero]
    ran = run_script(RECIPE / "run_translation.py", *arguments, "--max_target_length", 16, folder=folder)
    assert ran.status == [0, 0], ran.err
    results = json.loads((folder / "evaluated" / "eval_results.json").read_text())
    for part in PARTS:
        assert results[f"{part}_loss"] > 5 and 0 <= results[f"{part}_BLEU"] <= results[f"{part}_chrF2"] <= 100
        with (folder / "evaluated" / f"{part}.tsv").open(newline="") as file:
            assert [len(row) for row in csv.reader(file, delimiter="\t")] == [3] * 6

    texts = ["Null characters are not allowed.", "Monday"]
    ran = run_script(RECIPE / "t0.py", "small", folder=folder, ACCELERATE_USE_CPU="true")
    assert ran.status == [0, 0], ran.err
    model, tokenizer = (kind.from_pretrained(folder / "small") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    for rank, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        answer = tokenizer.decode(model.generate(ids, max_new_tokens=64)[0], skip_special_tokens=True)
        assert f"rank{rank}:\n   in={text}\n  out={answer}\n" in ran.out


@pytest.mark.slow
def test_the_report_is_written_from_what_runs_wrote(folder: Path, tmp_path: Path) -> None:
    for name in RUNS:
        (tmp_path / name).mkdir()
        history = [{"loss": 3.0 - 0.1 * step} for step in range(5)]
        (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "trained").mkdir()
    results = {f"{part}_{key}": 12.345 for part in PARTS for key in ("loss", "BLEU", "chrF2")}
    (tmp_path / "trained" / "eval_results.json").write_text(json.dumps(results))
    for part in PARTS:
        (tmp_path / "trained" / f"{part}.tsv").write_text("one two three\tunu doi trei\tunu\n")
    ran = run_script(RECIPE / "report.py", ".", "--output", ".", folder=tmp_path, processes=1)
    assert ran.status == [0], ran.err
    text = (tmp_path / "report.md").read_text()
    assert "| stage 3, offload, two processes | 3.0000 | 2.6000 | 0e+00 | 0e+00 |" in text
    assert (
        "| held out | 12.345 | 12.3 | 12.3 |" in text and "| held out | one two three | unu doi trei | unu |" in text
    )
    assert (tmp_path / "losses.svg").read_text().count("<path") > 9
