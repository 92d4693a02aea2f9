"""The recipe of inference in shards: on every medium, and however tokens are drawn, it writes the plain texts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_zero import ZeroConfig
from recipes.zero_inference import generate
from recipes.zero_inference.generate import Outcome
from recipes.zero_inference.texts import Options, Written, deal, prepare_tokenizer, write
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "zero_inference"
MEDIA = {"zero3": "device", "zero3_cpu": "host", "zero3_nvme": "disk"}
PROMPTS = ["a cat", "the longest of these prompts by far", "so"]
GREEDY = Options(max_new_tokens=7, do_sample=False, temperature=0.7, top_p=0.9, num_beams=1, seed=3, chat=True)


def save_model(folder: Path) -> Path:
    """A Llama of four layers whose texts do not repeat one token, and a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
    fast.chat_template = "{% for message in messages %}Q: {{ message.content }} A:{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=vocabulary["</s>"],
            pad_token_id=vocabulary["</s>"],
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def plain_texts(model: Path, options: Options, batches: list[list[str]], numbers: list[int]) -> list[Written]:
    tokenizer = prepare_tokenizer(AutoTokenizer.from_pretrained(model))
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    return [
        one
        for batch, number in zip(batches, numbers, strict=True)
        for one in write(plain, tokenizer, batch, options, number=number)
    ]


# ---------------------------------------------------------------- the parts
@pytest.mark.parametrize("name", MEDIA)
def test_files_are_complete_configurations(name: str) -> None:
    config = ZeroConfig.load(str(RECIPE / f"{name}.json"))
    assert config.check() == []
    assert config.stage == 3
    device = config.get("zero_optimization.offload_param.device", "none")
    assert device == {"zero3": "none", "zero3_cpu": "cpu", "zero3_nvme": "nvme"}[name]


def test_every_prompt_is_dealt_once() -> None:
    assert deal(["a", "b", "c", "d", "e"], 2, batch_size=2) == [[["a", "c"], ["e"]], [["b", "d"]]]
    assert deal(["a"], 3, batch_size=4) == [[["a"]], [], []]


@pytest.mark.parametrize("chat", [True, False])
def test_padding_changes_no_text(model: Path, chat: bool) -> None:
    options = dataclasses.replace(GREEDY, chat=chat)
    together = plain_texts(model, options, [PROMPTS], [0])
    assert together == plain_texts(model, options, [[prompt] for prompt in PROMPTS], [0, 0, 0])
    assert len({one.text for one in together}) == len(PROMPTS), "the model takes no notice of its prompt"
    # Padded on the other side, the short ones would go on from padding.
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="right")
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    wrong = write(plain, tokenizer, PROMPTS, options, number=0)
    assert wrong[1] == together[1]
    assert wrong[0] != together[0]


def test_comparison_names_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = Outcome([Written("one", "1", 1), Written("two", "2", 1)], 0.0, 1.0, {}, 0)
    assert generate.compare([outcome], [list(outcome.written)], 0)
    assert "All 2 texts are those of plain transformers" in capsys.readouterr().out
    assert not generate.compare([outcome], [[outcome.written[0], Written("two", "3", 1)]], 0)
    assert "DIFFERENT: in=two" in capsys.readouterr().out


# ---------------------------------------------------------------- on two ranks
DECODING = {"greedy": [], "beams": ["--num_beams", "2"], "sampled": ["--do_sample", "--temperature", "1.5"]}


def run_all(model: str, swap: str) -> dict[str, list[Outcome]]:
    """Return by configuration and decoding the outcomes of both ranks."""
    tokenizer = prepare_tokenizer(AutoTokenizer.from_pretrained(model))
    found = {}
    for name in MEDIA:
        for gather in ("once", "stream"):
            for decoding, more in DECODING.items():
                command = ["--model", model, "--zero", str(RECIPE / f"{name}.json"), "--nvme_path", swap]
                command += ["--gather", gather, "--batch_size", "1", "--max_new_tokens", "7", "--prompts", *PROMPTS]
                args = generate.parse([*command, *more])
                options = generate.make_options(args, tokenizer)
                found[f"{name} {gather} {decoding}"] = generate.run(args, model, tokenizer, options)[2]
    return found


def reference(model: Path, decoding: str) -> list[list[Written]]:
    command = ["--zero", "", "--max_new_tokens", "7", *DECODING[decoding]]
    options = generate.make_options(generate.parse(command), AutoTokenizer.from_pretrained(model))
    # Rank 0 has the first and the third prompt, in batches of one: numbers 0 and 2 of the run.
    return [
        plain_texts(model, options, [[PROMPTS[0]], [PROMPTS[2]]], [0, 2]),
        plain_texts(model, options, [[PROMPTS[1]]], [1]),
    ]


@pytest.mark.nightly
def test_texts_are_the_plain_models_on_every_medium(model: Path, tmp_path: Path) -> None:
    everyone = run_ranks(run_all, 2, str(model), str(tmp_path), timeout=180)
    expected = {decoding: reference(model, decoding) for decoding in DECODING}
    assert expected["sampled"] != expected["greedy"] != expected["beams"]
    for key, outcomes in everyone[0].items():
        name, gather, decoding = key.split()
        assert [outcome.written for outcome in outcomes] == expected[decoding], key
        whole = everyone[0][f"{name} once {decoding}"][0].memory["gathered_peak"]
        for outcome in outcomes:
            memory: dict[str, Any] = outcome.memory
            medium = MEDIA[name]
            assert memory[medium] > 0.9 * memory["total"] > 0, key
            assert all(memory[other] == 0 for other in ("host", "disk") if other != medium), key
            if gather == "stream":
                assert 0 < memory["gathered_peak"] < whole, key


@pytest.mark.nightly
@pytest.mark.parametrize(("processes", "name"), [(2, "zero3_nvme"), (1, "zero3_cpu")])
def test_command_compares_with_a_plain_process(processes: int, name: str, model: Path, tmp_path: Path) -> None:
    command = ["--model", str(model), "--zero", str(RECIPE / f"{name}.json")]
    command += ["--gather", "stream", "--nvme_path", str(tmp_path), "--compare", "--prompts", *PROMPTS]
    ran = run_script(RECIPE / "generate.py", *command, folder=tmp_path, processes=processes, ACCELERATE_USE_CPU="true")
    assert ran.status == [0] * processes, ran.out + ran.err
    assert "All 3 texts are those of plain transformers in one process." in ran.out
    assert [ran.out.count(f"\nrank {rank}") for rank in range(2)] == [1, processes - 1]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
