"""`hf-zero estimate`: its answers, and one line for a mistake."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from hf_zero.extras.cli.main import main
from hf_zero.extras.cli.text import format_bytes
from hf_zero.extras.estimate.choices import DEVICE_RESERVE, DEVICE_SHARE

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=500, max_position_embeddings=64)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(made)
    return made


def ask(capsys: Capture, *arguments: object) -> Any:
    assert main(["estimate", *map(str, arguments), "--json"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") > 100, "a value a line"
    if "--plot" in arguments:
        assert said.err == f"wrote {arguments[arguments.index('--plot') + 1]}\n"
    return json.loads(said.out)


def fails(capsys: Capture, *arguments: object) -> str:
    try:
        status = main(["estimate", *map(str, arguments)])
    except SystemExit as left:
        assert isinstance(left.code, int)
        status = left.code
    captured = capsys.readouterr()
    assert (status, captured.out, captured.err.count("\n")) == (2, "", 1), captured
    return captured.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--gpus 0", "argument --gpus: '0' is not a whole number from 1"),
        ("--nodes -1", "argument --nodes"),
        ("--gpu-memory 80GX", "'80GX' is not a size such as 5GB, 500MB or 2GiB"),
        ("--gpu-memory 80", "'80' is not a size"),
        ("--cpu-memory 0GB", "'0GB' is not a size"),
        ("--cpu-memory lots", "'lots' is not a size"),
        ("--batch-size two", "'two' is not a whole number"),
        ("--config nowhere.json", "nowhere.json"),
    ],
)
def test_bad_options_are_status_2(capsys: Capture, folder: Path, options: str, text: str) -> None:
    assert text in fails(capsys, folder, *options.split())


def test_bad_models_are_status_2(capsys: Capture, tmp_path: Path) -> None:
    assert fails(capsys, tmp_path / "nowhere").endswith(
        "nowhere: no such file or folder (see hf-zero estimate --help)\n"
    )
    assert "config.json is missing" in fails(capsys, tmp_path)
    file = tmp_path / "config.json"
    for text, reason in (
        ("{", "is no model configuration"),
        ("[1]", "it has no model_type"),
        ("{}", "it has no model_type"),
        ('{"model_type": "abacus"}', "does not know model_type 'abacus'"),
    ):
        file.write_text(text)
        assert reason in fails(capsys, file)
        assert reason in fails(capsys, tmp_path)


def test_a_wrong_configuration_is_status_2(capsys: Capture, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimisation": {"stage": 3}}')
    assert "zero_optimisation" in fails(capsys, folder, "--config", file)


def test_every_legal_choice_is_planned(capsys: Capture, folder: Path) -> None:
    answer = ask(capsys, folder, "--gpus", 4, "--sequence-length", 16)
    rows = {(row["stage"], row["optimizer"], row["param"]): row for row in answer["choices"]}
    media = ("none", "cpu", "nvme")
    assert set(rows) == {
        (0, "none", "none"),
        *((stage, medium, "none") for stage in (1, 2) for medium in media),
        *((3, medium, other) for medium in media for other in media),
    }
    assert answer["recommended"] is None
    assert answer["activations"]["saved_bytes"] > 0
    for key, row in rows.items():
        assert row["device_bytes"] == sum(row["device"].values()), key
        assert (row["disk_bytes_per_node"] > 0) == (key[1] == "nvme"), key  # max_in_cpu holds all parameters
        assert (row["host_bytes_per_node"] > 0) == (key[1:] != ("none", "none")), key
    numel = answer["parameters"]
    for stage, per_param in ((0, 18), (1, 6 + 12 / 4), (2, 2 + 16 / 4)):  # tests/runtime/test_memory_law.py
        assert rows[stage, "none", "none"]["report"]["total"] == pytest.approx(per_param * numel, rel=0.02)


@pytest.mark.slow
def test_advice(capsys: Capture, folder: Path) -> None:
    plain = ask(capsys, folder / "config.json", "--gpus", 2, "--gpu-memory", "80GB")["recommended"]
    assert plain["choice"] == {"stage": 1, "optimizer": "none", "param": "none"}
    assert "no other choice moves fewer bytes" in plain["reason"] and not plain["gradient_checkpointing"]
    alone = ask(capsys, folder, "--gpu-memory", "80GB")["recommended"]
    assert alone["choice"]["stage"] == 0
    rows = ask(capsys, folder, "--gpus", 32, "--batch-size", 2)["choices"]
    one, two = (next(row["device_bytes"] for row in rows if row["stage"] == stage) for stage in (1, 2))
    assert one > two
    # Beside what a process needs for itself, room for stage 2 but not for a larger micro-batch, nor for stage 1.
    tight = int((two + (one - two) / 20 + 2e9) / 0.95)
    squeezed = ask(capsys, folder, "--gpus", 32, "--batch-size", 2, "--gpu-memory", f"{tight}B")["recommended"]
    assert squeezed["choice"]["stage"] == 2
    assert squeezed["micro_batch_size"] == 2
    assert f"stage 1, no offload would need {format_bytes(one)} at micro-batch 2, and " in squeezed["reason"]
    nothing = ask(capsys, folder, "--gpus", 2, "--gpu-memory", "1GB", "--cpu-memory", "1MB")["recommended"]
    assert nothing["choice"] is None
    assert nothing["reason"].startswith("nothing fits")


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["2.3GB", "3GB"])  # little above and far above what is kept for the process
def test_the_memory_is_that_of_the_micro_batch_that_is_named(memory: str, capsys: Capture, folder: Path) -> None:
    line = [folder, "--gpus", 2, "--sequence-length", 32]
    advice = ask(capsys, *line, "--gpu-memory", memory)["recommended"]
    size = advice["micro_batch_size"]
    assert size > 1, "vacuous: it is the one that was planned first"
    usable = int(float(memory.removesuffix("GB")) * 1e9 * 0.95) - 2_000_000_000
    needed = []
    for batch in (size, 2 * size):
        rows = ask(capsys, *line, "--batch-size", batch)["choices"]
        needed.append(next(row["device_bytes"] for row in rows if row.items() >= advice["choice"].items()))
    assert f"it needs {format_bytes(needed[0])} per rank" in advice["reason"]
    assert needed[0] <= usable and (needed[1] > usable or size == 1024)


@pytest.mark.slow
def test_gradient_checkpointing_is_proposed_before_the_disk(capsys: Capture, folder: Path) -> None:
    line = [folder, "--gpus", 2, "--batch-size", 64]

    def device_of(*more: object) -> int:
        rows = ask(capsys, *line, *more)["choices"]
        return min(row["device_bytes"] for row in rows if "nvme" not in (row["optimizer"], row["param"]))

    plain, checkpointed = device_of(), device_of("--gradient-checkpointing")
    assert checkpointed < 0.8 * plain, "vacuous: it saves nothing"
    memory = f"{int(((plain + checkpointed) / 2 + 2e9) / 0.95)}B"
    advice = ask(capsys, *line, "--gpu-memory", memory)["recommended"]
    assert advice["gradient_checkpointing"] and advice["micro_batch_size"] == 64
    assert "nvme" not in advice["choice"].values()
    again = ask(capsys, *line, "--gpu-memory", memory, "--gradient-checkpointing")["recommended"]
    assert again["choice"] == advice["choice"] and not again["gradient_checkpointing"]
    assert again["micro_batch_size"] == 64
    assert main(["estimate", *map(str, line), "--gpu-memory", memory]) == 0
    assert ", with gradient checkpointing, micro-batch 64: " in capsys.readouterr().out.splitlines()[-1]


def test_a_name_of_the_hub_is_found_where_it_is_cached(
    capsys: Capture, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    said = fails(capsys, "someone/some-model")
    assert f"the cache of the Hub ({tmp_path}) has no config.json" in said
    assert "`hf download someone/some-model config.json`" in said and "a folder or a config.json" in said
    snapshot = tmp_path / "models--someone--some-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_bytes((folder / "config.json").read_bytes())
    line = ["--gpus", 2, "--sequence-length", 16]
    assert ask(capsys, "someone/some-model", *line) == ask(capsys, folder, *line)


def test_host_memory_is_that_of_a_node_as_its_limit(capsys: Capture, folder: Path) -> None:
    line = [folder, "--gpus", 4, "--cpu-memory", "12MB", "--sequence-length", 16]
    rows = ask(capsys, *line)["choices"]
    assert {row["fits"] for row in rows} == {True, False}
    assert all(row["fits"] == (row["host_bytes_per_node"] <= 10_800_000) for row in rows)  # 10 % are left free
    assert main(["estimate", *map(str, line)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "can be used: 10.8 MB of the host memory of a node" in lines
    table = [re.split(r"  +", one.strip()) for one in lines]
    head = next(one for one in table if one[0] == "stage")
    body = [one for one in table if one[0] in ("0", "1", "2", "3") and len(one) > 5]
    shown = [one[head.index("host/node")] for one in body]
    assert shown == [format_bytes(row["host_bytes_per_node"]) if row["host_bytes_per_node"] else "-" for row in rows]
    assert [one[-1] == "too large: host/node" for one in body] == [not row["fits"] for row in rows]


def test_the_configuration_counts(capsys: Capture, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    auto = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}, "train_micro_batch_size_per_gpu": "auto"}
    file.write_text(json.dumps({**auto, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}))
    rows = ask(capsys, folder, "--gpus", 2, "--config", file, "--batch-size", 3)
    assert rows["batch_size"] == 3
    assert all(row["report"]["optimizer"] == 0 for row in rows["choices"])  # SGD without momentum keeps nothing
    # The native rule, which disks need, is Adam's; a block's SGD runs in torch on the host.
    assert {row["optimizer"] for row in rows["choices"]} == {"none", "cpu"}


@pytest.mark.slow
def test_text(capsys: Capture, folder: Path) -> None:
    assert main(["estimate", str(folder), "--gpus", "2", "--gpu-memory", "24GB", "--gradient-checkpointing"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert out.splitlines()[-1].startswith("Take stage 1, no offload, micro-batch ")
    assert main(["estimate", str(folder)]) == 0
    assert "Name the hardware" in capsys.readouterr().out


def test_a_picture_shows_the_device_memory_of_every_choice(capsys: Capture, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "plan.svg"
    answer = ask(capsys, folder, "--gpus", 2, "--gpu-memory", "2.15GB", "--cpu-memory", "64GB", "--plot", file)
    words = re.findall(r"<text[^>]*>([^<]*)<", file.read_text())
    rows = [row for row in answer["choices"] if "nvme" not in (row["optimizer"], row["param"])]
    kinds = ("device_bytes", "host_bytes_per_node")
    sizes = [format_bytes(row[kind]) if row[kind] else "-" for kind in kinds for row in rows]
    assert [word for word in words if word in {*sizes}] == sizes
    assert "stage 3, optimizer and parameters on the CPU" in words
    assert "GPU, limit 42.5 MB" in words  # 5 % and 2 GB are left
    assert "host memory of a node, 2 ranks, limit 57.6 GB" in words
    assert main(["estimate", str(folder), "--plot", str(file / "plan.png")]) == 1
    assert f"cannot write {file / 'plan.png'}" in capsys.readouterr().err


def test_a_picture_that_cannot_be_drawn_is_refused_before_planning(
    capsys: Capture, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--plot plan.doc: the name must end in one of " in fails(capsys, folder, "--plot", "plan.doc")
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["estimate", str(folder), "--plot", "plan.png"]) == 1
    said = capsys.readouterr()
    assert "pip install matplotlib" in said.err and not said.out


SPEEDS = ("--tflops", 1, "--link", "1GB/s", "--network", "10MB/s")


def test_times_of_a_step(capsys: Capture, folder: Path) -> None:
    nodes = ("--gpus", 2, "--nodes", 2)
    rows = ask(capsys, folder, *nodes, *SPEEDS)["times"]
    found = {(row["stage"], row["sharding_group"]): row for row in rows}
    in_groups = [(stage, group) for stage in (1, 2, 3) for group in ("all", "host")]
    assert list(found) == [(0, "all"), *in_groups]
    # Over 10 MB/s, and with operations of no bytes to speak of, the time is that of the bytes between nodes.
    for row in rows:
        assert row["total"] == pytest.approx(row["across"] / 10e6, rel=0.1)
    # The ring of all ranks brings 3 quarters of a tensor to a node, and groups a half.
    assert found[2, "all"]["across"] == pytest.approx(1.5 * found[2, "host"]["across"], rel=0.01)
    slower = ask(capsys, folder, *nodes, *SPEEDS, "--latency", 1e6)["times"]
    assert slower[-1]["total"] > found[3, "host"]["total"] + 5
    assert ask(capsys, folder, *nodes)["times"] == []


def test_one_rank_waits_for_nothing(capsys: Capture, folder: Path) -> None:
    rows = ask(capsys, folder, "--tflops", 1, "--latency", 1e6)["times"]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    assert all(row["total"] == row["computing"] > 0 and row["waiting"] == 0 for row in rows)


def test_a_group_of_the_file_is_timed(capsys: Capture, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mics.json").write_text(json.dumps({"zero_optimization": {"mics_shard_size": 2}}))
    rows = ask(capsys, folder, "--gpus", 4, "--nodes", 2, *SPEEDS, "--config", tmp_path / "mics.json")["times"]
    assert [(row["stage"], row["sharding_group"]) for row in rows] == [(stage, 2) for stage in (1, 2, 3)]


def test_the_fastest_that_fits_is_named(capsys: Capture, folder: Path) -> None:
    line = ["estimate", folder, "--gpus", 2, "--nodes", 2, *SPEEDS, "--gpu-memory", "24GB"]
    assert main([*map(str, line)]) == 0
    out = capsys.readouterr().out
    best = re.search(r"^Fastest: (.*), [\d.]+ s\.$", out, re.MULTILINE)
    assert best is not None and best[1].endswith('"sharding_group": "host"')
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line.startswith("stage ")}
    seconds = {name: float(cells[-4]) for name, cells in rows.items() if name.startswith("stage ") and len(cells) > 8}
    assert seconds[best[1]] == min(seconds.values())


def gpu_memory(nbytes: float) -> tuple[str, str]:
    """Return the option for a GPU on which so many bytes can be used."""
    return ("--gpu-memory", f"{int((nbytes + DEVICE_RESERVE) / DEVICE_SHARE)}B")


@pytest.mark.parametrize("checkpoints", [False, True])
def test_what_is_advised_is_timed_with_its_offload(capsys: Capture, folder: Path, checkpoints: bool) -> None:
    task = (str(folder), "--gpus", "2", "--nodes", "2", "--batch-size", "8")

    def bytes_of_stage_3(*more: str) -> dict[tuple[str, str], int]:
        choices = ask(capsys, *task, *more)["choices"]
        return {(one["optimizer"], one["param"]): one["device_bytes"] for one in choices if one["stage"] == 3}

    needs = bytes_of_stage_3()
    between = needs["cpu", "none"], needs["none", "none"]
    if checkpoints:
        between = bytes_of_stage_3("--gradient-checkpointing")["cpu", "none"], min(needs.values())
    assert main(["estimate", *task, *map(str, SPEEDS), *gpu_memory(sum(between) / 2)]) == 0
    out = capsys.readouterr().out
    taken = re.search(r"^Take (stage \d, optimizer states on the host)(, with .*)?, micro-batch", out, re.MULTILINE)
    line = r'^Fastest: (.*?)(, "sharding_group": "host")?, [\d.]+ s, and the copies'
    best = re.search(line, out, re.MULTILINE)
    assert taken is not None and best is not None and bool(taken[2]) == checkpoints
    assert best[1] == taken[1] + ", gradient checkpointing" * checkpoints


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", 2, "--tflops", 1), "--tflops: name --link, too (hf-zero bench comm measures it)"),
        (("--nodes", 2, "--tflops", 1), "--tflops: name --network, too"),
        (("--gpus", 2, "--link", "1GB/s"), "--link and --network are for the time of a step: name --tflops, too"),
        (("--tflops", 0), "0 is not above 0"),
        (("--tflops", 1, "--link", "fast"), "'fast' is not a size such as"),
    ],
)
def test_speeds_that_are_missing_or_wrong(capsys: Capture, folder: Path, words: tuple[object, ...], said: str) -> None:
    assert said in fails(capsys, folder, *words)
