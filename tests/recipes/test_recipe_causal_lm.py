"""The parts of recipes/causal_lm that need no ZeRO: text, model folders, the comparison of two runs."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from recipes.causal_lm import model as recipe_model
from recipes.causal_lm.data import load_blocks, pack, stdlib_functions
from recipes.causal_lm.prepare import keep_first_layers
from recipes.causal_lm.report import show_resume

ROOT = Path(__file__).resolve().parents[2]


class ByteTokenizer:
    """One token per byte."""

    eos_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": list(text.encode())}


def tiny_llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=layers, **sizes))


def test_packing_loses_no_token_and_pads_none() -> None:
    blocks = pack(["abc", "de", "fghi"], ByteTokenizer(), length=4, most=10)
    assert [bytes(row.tolist()) for row in blocks.ids] == [b"abc\0", b"de\0f", b"ghi\0"]
    assert len(pack(["abc", "de", "fghi"], ByteTokenizer(), length=4, most=2)) == 2
    assert torch.equal(blocks[1]["input_ids"], blocks[1]["labels"])


@pytest.mark.slow
def test_stdlib_text_is_deterministic_and_split() -> None:
    sizes = {"config": None, "text_column": "text", "length": 64, "num_train": 40, "num_eval": 8}
    train, evaluation = load_blocks("stdlib", ByteTokenizer(), **sizes)
    again, _ = load_blocks("stdlib", ByteTokenizer(), **sizes)
    assert train.ids.shape == (40, 64)
    assert evaluation.ids.shape == (8, 64)
    assert torch.equal(train.ids, again.ids)
    document = next(stdlib_functions("eval"))
    assert document.startswith("def ")
    assert '"""' in document


def test_text_file_is_split_in_disjoint_parts(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    documents = [f"document number {i} " * 3 for i in range(200)]
    file.write_text("\n\n".join(documents))
    sizes = {"config": None, "text_column": "text", "length": 16, "num_train": 10_000, "num_eval": 10_000}
    train, evaluation = load_blocks(str(file), ByteTokenizer(), **sizes)
    texts = [bytes(part.ids.flatten().tolist()).split(b"\0") for part in (train, evaluation)]
    kept = [set(text[:-1]) for text in texts]  # the last document may have lost its end
    assert not kept[0] & kept[1]
    assert len(kept[0]) > len(kept[1]) > 5


def test_too_short_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("short")
    with pytest.raises(SystemExit, match="shorter than one block of 64 tokens"):
        load_blocks(str(file), ByteTokenizer(), config=None, text_column="text", length=64, num_train=2, num_eval=2)


def test_first_layers_are_kept() -> None:
    whole, cut = tiny_llama(4), tiny_llama(4)
    keep_first_layers(cut, 3)
    assert cut.config.num_hidden_layers == len(cut.model.layers) == 3
    for name, tensor in cut.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])
    with pytest.raises(SystemExit, match="give 1 to 3"):
        keep_first_layers(cut, 4)


@pytest.mark.slow
def test_ranks_that_ask_at_once_get_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks need a model that has to be made first; a truncated one, from a folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    source = tmp_path / "whole"
    tiny_llama(3).save_pretrained(source)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>").save_pretrained(source)
    monkeypatch.setenv("HF_ZERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ask = f"from recipes.causal_lm.model import resolve_model; print(resolve_model({str(source)!r}, 2))"

    def rank(_: int) -> str:
        command = [sys.executable, "-c", ask]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()[-1]

    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(rank, range(2)))
    path = recipe_model.prepared_path(str(source), 2)
    assert folders == {str(path)}
    assert path is not None
    assert [entry.name for entry in path.parent.iterdir() if entry.is_dir()] == [path.name]
    model = AutoModelForCausalLM.from_pretrained(path)
    assert len(model.model.layers) == 2


def write_slice(folder: Path, losses: dict[int, float], steps_run: int) -> Path:
    folder.mkdir()
    steps = [{"step": step, "loss": loss} for step, loss in losses.items()]
    (folder / "summary.json").write_text(json.dumps({"steps": steps, "steps_run": steps_run, "max_steps": 4}))
    return folder


def test_resume_is_compared_to_the_last_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}
    first = write_slice(tmp_path / "first", losses, steps_run=4)
    # The log of a resumed run begins with what the checkpoint held.
    same = write_slice(tmp_path / "same", losses, steps_run=2)
    other = write_slice(tmp_path / "other", {**losses, 4: 1.0 + 2**-50}, steps_run=2)
    short = write_slice(tmp_path / "short", {1: 4.0, 2: 3.0, 3: 2.0}, steps_run=2)
    assert show_resume(first, same) == 0
    assert "All 2 losses after resuming are equal" in capsys.readouterr().out
    assert show_resume(first, other) == 1
    assert "1 of 2 losses DIFFER" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="logged 1 of its 2 steps"):
        show_resume(first, short)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "4"], "--stage takes 0, 1, 2 or 3"),
        (["--steps", "5"], "even number"),
        (["--procs", "none"], "--procs takes a number from 1 up"),
        (["--layers"], "--layers needs a value"),
        (["--launcher", "mpi"], "torchrun or accelerate"),
        (["--stages", "3"], "unknown option '--stages'"),
    ],
)
def test_quickstart_refuses_bad_arguments(arguments: list[str], message: str) -> None:
    command = ["bash", "scripts/quickstart.sh", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_quickstart_empties_no_folder_that_it_did_not_make(tmp_path: Path) -> None:
    keep = tmp_path / "thesis.tex"
    keep.write_text("years of work")
    command = ["bash", "scripts/quickstart.sh", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert "not empty" in done.stderr
    assert keep.read_text() == "years of work"
