"""The recipe of FP8, run as a user would: its two networks on digits, its language model, and the report of both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.harness.ranks import run_ranks
from tests.harness.scripts import Ran, become
from tests.harness.torchao_path import use_torchao

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "fp8"
STEPS = 150
FP16, O2, O3, O3_TE = "ds_config", "ds_config_msamp", "ds_config_zero_msamp", "ds_config_zero_te_msamp"


def become_with_torchao(argv: list[str], folder: str) -> tuple[int, str, str]:
    use_torchao()
    return become(argv, folder, None)


def run(script: str, *arguments: object, folder: Path, processes: int = 2) -> Ran:
    argv = [str(RECIPE / script), *map(str, arguments)]
    results = run_ranks(become_with_torchao, processes, argv, str(folder), init_group=False, timeout=120)
    return Ran(*([result[number] for result in results] for number in range(3)))


def train_images(config: str, folder: Path) -> Ran:
    images = 16 * STEPS  # one step for every 16 of them
    arguments = ["--net", "Net", "--deepspeed_config", RECIPE / f"{config}.json", "-e", 1, "--images", images]
    return run("../images/train.py", *arguments, "--log-interval", STEPS // 3, folder=folder)


def losses_of(ran: Ran) -> list[float]:
    assert ran.status == [0, 0], ran.err
    return [float(loss) for loss in re.findall(r"^\[1, +\d+\] loss: ([0-9.]+)$", ran.out, re.M)]


@pytest.mark.slow
def test_images_learn_in_fp8_what_they_learn_in_fp16(tmp_path: Path) -> None:
    fp16 = train_images(FP16, tmp_path)
    first, *_, last = losses_of(fp16)
    assert "Float8Linear" not in fp16.out and "\nfp16=True\n" in fp16.out
    assert 2.4 > first > 2.0 > 0.8 > last, "the reference did not learn"
    for config in (O2, O3):
        ran = train_images(config, tmp_path)
        for layer in ("fc1", "fc2", "fc3"):
            assert f"({layer}): Float8Linear(" in ran.out
        assert "\nfp16=True\n" in ran.out
        assert "Attempted loss scale: 32768" in ran.err  # so steps are skipped
        assert abs(losses_of(ran)[-1] - last) < 0.05 * last
        assert int(re.findall(r"^Accuracy of the network on the 1000 test images: (\d+) %$", ran.out, re.M)[0]) > 80
        assert len(re.findall(r"^Accuracy of +\w+ : +\d+ %$", ran.out, re.M)) == 10


def test_a_configuration_with_transformer_engine_is_refused_by_name(tmp_path: Path) -> None:
    ran = train_images(O3_TE, tmp_path)
    assert ran.status == [1, 1]
    for text in ran.errs:
        assert "msamp.use_te = true: TransformerEngine cannot be imported" in text


@pytest.mark.nightly
def test_mnist_trains_in_a_plain_loop(tmp_path: Path) -> None:
    ran = run("mnist.py", "--enable-msamp", "--opt-level=O2", "--epochs=1", folder=tmp_path, processes=1)
    assert ran.status == [0], ran.err
    assert ran.out.startswith("msamp is enabled, opt_level: O2\nTrain Epoch: 1 [0/4000 (0%)]\tLoss: 2.")
    assert "\nTrain Epoch: 1 [640/4000 (16%)]\tLoss: " in ran.out
    accuracy = re.findall(r"^Test set: Average loss: 0\.\d{4}, Accuracy: (\d+)/1000 \(\d+%\)$", ran.out, re.M)
    assert len(accuracy) == 1 and int(accuracy[0]) > 800


def train_language(level: str, *options: object, folder: Path) -> None:
    ran = run("language.py", "--level", level, *options, folder=folder)
    assert ran.status == [0, 0], ran.err


@pytest.mark.nightly
def test_the_report_compares_runs_with_seeds_of_bf16(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    sizes = ["--steps", 3, "--rows", 1, "--length", 16, "--output", runs]
    for options in (["bf16"], ["bf16", "--seed", 1], ["fp32"], ["fp32", "--stage", 2], ["O2"], ["O3"], ["Q8"]):
        train_language(*options, *sizes, folder=tmp_path)
    lines = [json.loads(line) for line in (runs / "small-O3-stage2-seed0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    rest = lines[-1]["at_rest"]
    expected = {"weights": 2.0, "gradient": 0.5, "master": 1.0, "first": 0.5, "second": 1.0}  # on two ranks
    assert rest == pytest.approx(expected, rel=0.1)  # the embedding has no 8 bits

    ran = run("report.py", runs, "--output", tmp_path, folder=tmp_path, processes=1)
    assert ran.status == [0], ran.err
    text = (tmp_path / "report.md").read_text()
    assert re.search(
        r"^\| O2, stage 0 \| \d\.\d{4} \| [-+][0-9.]+ \| \d, \d, \d \| [-+]\d\.\d{4} \| \d+% \|$", text, re.M
    )
    assert re.search(r"^\| O3, stage 2 \| 2\.00 \| .* \| 3\d% \|$", text, re.M)  # 8 and 16 bits beside twice 32
    assert (tmp_path / "losses-small.svg").read_text().count("<path") > 12

    train_language("fp32", "--seed", 1, *sizes, folder=tmp_path)
    train_language("Q8_fp32", *sizes, folder=tmp_path)
    other = runs / "small-bf16-stage0-seed0.jsonl"
    other.rename(runs / "kept")
    ran = run("report.py", runs, "--output", tmp_path, folder=tmp_path, processes=1)
    assert ran.status == [0], ran.err
    text = (tmp_path / "report.md").read_text()
    assert "from fp32 of the same seed" in text and re.search(r"^\| Q8_fp32, stage 3 \| .* \| \d+% \|$", text, re.M)
    (runs / "kept").rename(other)

    unfinished = runs / "small-bf16-stage0-seed1.jsonl"
    unfinished.write_text("".join(unfinished.read_text().splitlines(keepends=True)[:2]))
    ran = run("report.py", runs, "--output", tmp_path, folder=tmp_path, processes=1)
    assert ran.status == [1] and "(3 of seed 0, 2 of seed 1). Finish these runs." in ran.err, ran.err
