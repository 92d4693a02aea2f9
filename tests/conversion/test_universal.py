"""DeepSpeed's universal checkpoints: read as its own converter writes them, and written as that does.

That DeepSpeed goes on from what is written is shown by tests/nightly/test_under_deepspeed.py, which needs DeepSpeed.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.checkpoint.folders import read_manifest
from hf_zero.checkpoint.writer import Chunked
from hf_zero.conversion.deepspeed import STAND_INS, convert
from hf_zero.conversion.pickles import load_anything, load_pickle
from hf_zero.conversion.target import NOTHING_KNOWN, ConvertedParam, write_checkpoint
from hf_zero.conversion.universal import from_universal, to_universal
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.main import main
from tests.conversion.test_from_deepspeed import DATA, Harmful, places
from tests.conversion.tiny_model import ROWS, batch, groups, tiny_model
from tests.harness.ranks import run_ranks

TAG = "global_step3_universal"
NAMES = ("embed.weight", "up.weight", "up.bias", "down.weight")


def content(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The tensors and the manifest of a converted checkpoint, but for its time."""
    manifest = read_manifest(folder).to_json()
    return (folder / "zero" / "rank-00000.safetensors").read_bytes(), manifest | {"saved_at": 0}


@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_a_universal_checkpoint_is_the_save_it_was_made_from(name: str, tmp_path: Path) -> None:
    """Other tests show that what from-deepspeed makes of the ranks' files goes on with DeepSpeed's losses. other tests
    show that.
    """
    convert(DATA / name, tmp_path / "of ranks")
    for number, source in enumerate([DATA / name, DATA / name / TAG]):
        done = from_universal(source, tmp_path / str(number))
        assert content(tmp_path / str(number)) == content(tmp_path / "of ranks")
        assert (done.stage, done.world_size, done.global_step, done.num_params) == (int(name[5]), 2, 3, 5)


@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_every_file_is_as_deepspeeds_own_converter_writes_it(name: str, tmp_path: Path) -> None:
    convert(DATA / name, tmp_path / "ours")
    written = to_universal(tmp_path / "ours", tmp_path / "universal").folder
    assert (tmp_path / "universal" / "latest_universal").read_text() == written.name == TAG
    theirs = DATA / name / TAG
    for param in NAMES:
        kinds = sorted(path.stem for path in (theirs / "zero" / param).iterdir())
        assert {"exp_avg", "exp_avg_sq", "fp32"} <= {*kinds}
        for kind in kinds:
            found, wanted = (load_anything(top / "zero" / param / f"{kind}.pt") for top in (written, theirs))
            if kind != "step":
                assert found["cat_dim"] == 0
                found, wanted = found["param"], wanted["param"] if name == "stage2" else wanted
                assert found.shape == dict(tiny_model(0).named_parameters())[param].shape
            assert torch.equal(found.flatten(), wanted.detach().flatten()), (param, kind)
        assert load_anything(written / "zero" / param / "step.pt") == torch.tensor(3.0)
    found, wanted = (load_pickle(top / "zero" / "optimizer_state.pt", STAND_INS) for top in (written, theirs))
    for mine, own in zip(found["param_groups"], wanted["param_groups"], strict=True):
        assert mine.items() <= own.items()
        assert {"lr", "betas", "eps", "weight_decay", "params"} <= {*mine}
    assert found["ds_version"] == "0.19.8"
    stage_3 = found["optimizer_state_dict"]
    assert stage_3["state"][0]["step"] == 3
    # DeepSpeed gives these to all groups, so what differs must not be there.
    assert {"betas", "eps"} <= {*stage_3["param_groups"][0]}
    assert not {"lr", "weight_decay"} & {*stage_3["param_groups"][0]}
    stages = {"stage2": "mp_rank_00_model_states.pt", "stage3": "zero_pp_rank_0_mp_rank_00_model_states.pt"}
    own = load_pickle(theirs / stages[name], STAND_INS)
    for file in stages.values():  # what is written is for both
        model = load_pickle(written / file)
        assert model.keys() - own.keys() == {"universal_checkpoint_info"}
        keys = ("buffer_names", "param_shapes", "shared_params", "skipped_steps", "global_steps", "dp_world_size")
        for key in (*keys, "mp_world_size", "epoch", "lr_scheduler"):
            assert model[key] == own[key], key
        assert torch.equal(model["module"]["gain"], tiny_model(0).gain)


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def engine_of(stage: int, seed: int, fp16: bool) -> Any:
    model = tiny_model(seed)
    config = {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": fp16, "initial_scale_power": 4},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 6}},
    }
    optimizer = torch.optim.AdamW(groups(model), lr=1.0)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def there_and_back(folder: str) -> list[tuple[list[float], list[float]]]:
    found = []
    for number, (stage, fp16) in enumerate([(2, False), (3, True)]):
        top = Path(folder, str(number))
        first = engine_of(stage, 0, fp16)
        train(first, 0, 3)
        first.save_checkpoint(str(top / "saved"), client_state={"epoch": 3})
        wanted = train(first, 3, 6)
        if dist.get_rank() == 0:
            to_universal(top / "saved", top / "universal")
            from_universal(top / "universal", top / "back")
        dist.barrier()
        second = engine_of(stage, 1, fp16)
        assert second.load_checkpoint(str(top / "back"))[1] == {"epoch": 3}
        assert second.global_steps == 3
        found.append((train(second, 3, 6), wanted))
    return found


def test_nothing_is_lost_on_the_way_there_and_back(tmp_path: Path) -> None:
    for found, wanted in run_ranks(there_and_back, 2, str(tmp_path))[0]:
        assert found == wanted
        assert max(wanted) - min(wanted) > 1e-2, "vacuous: nothing was trained"


# -------------------------------------------------------------------- bad input
def saved_with(folder: Path, steps: list[float | None], known: dict[str, Any], group: dict[str, Any]) -> Path:
    """A checkpoint of hf_zero with a parameter of three elements for each of `steps`."""
    ones = Chunked(3, torch.float32, lambda: iter([torch.ones(3)]))
    params = []
    for number, step in enumerate(steps):
        kinds = ("master",) if step is None else ("master", "exp_avg", "exp_avg_sq")
        scalars = {} if step is None else {"step": step}
        params.append(ConvertedParam(f"p{number}", (3,), torch.float32, True, dict.fromkeys(kinds, ones), scalars))
    write_checkpoint(folder, params, {}, replace(NOTHING_KNOWN, param_groups=[group], **known))
    return folder


def test_a_run_that_never_stepped_starts_at_step_0(tmp_path: Path) -> None:
    saved_with(tmp_path / "saved", [None], {"optimizer": "AdamW"}, {"lr": 0.1})
    zero = to_universal(tmp_path / "saved", tmp_path / "universal").folder / "zero" / "p0"
    assert load_anything(zero / "step.pt") == torch.tensor(0.0)
    assert torch.equal(load_pickle(zero / "exp_avg.pt")["param"], torch.zeros(3))


@pytest.mark.parametrize(
    ("steps", "extra", "group", "said"),
    [
        ([3, 2], {"optimizer": "AdamW"}, {"lr": 0.1}, r"steps differ \(p1 at 2, p0 at 3\)"),
        ([3, None], {"optimizer": "AdamW"}, {"lr": 0.1}, r"steps differ \(p1 at 0, p0 at 3\)"),
        ([3], {"optimizer": "RAdam"}, {"lr": 0.1}, "saved with RAdam: .* holds Adam and AdamW"),
        ([3], {"optimizer": "CPUAdam"}, {"bias_correction": False}, "no Adam without bias correction"),
    ],
)
def test_what_deepspeed_cannot_hold_is_an_error(
    steps: list[float | None], extra: dict[str, Any], group: dict[str, Any], said: str, tmp_path: Path
) -> None:
    saved_with(tmp_path / "saved", steps, extra, group)
    with pytest.raises(CheckpointError, match=said):
        to_universal(tmp_path / "saved", tmp_path / "universal")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def rewrite(change: Callable[[dict[str, Any]], Any], *path: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder.joinpath(TAG, *path)
        held = load_pickle(file, STAND_INS)
        held.pop("loss_scaler", None)
        change(held)
        torch.save(held, folder / "new")  # the file is mapped
        (folder / "new").replace(file)

    return edit


MODEL = "mp_rank_00_model_states.pt"
BIAS = ("zero", "up.bias")
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "latest names nothing": (lambda f: (f / "latest_universal").write_text("x"), "latest_universal names 'x'"),
    "no latest": (lambda f: (f / "latest_universal").unlink(), "no universal checkpoint of DeepSpeed"),
    "no global state": (lambda f: (f / TAG / "zero/optimizer_state.pt").unlink(), "no universal checkpoint"),
    "no model": (lambda f: (f / TAG / MODEL).unlink(), "cannot read .*No such file"),
    "no weights": (lambda f: (f.joinpath(TAG, *BIAS) / "fp32.pt").unlink(), "up.bias holds exp_avg.*expected fp32"),
    "no moment": (lambda f: (f.joinpath(TAG, *BIAS) / "exp_avg.pt").unlink(), "up.bias holds exp_avg_sq.pt, fp32"),
    "other state": (
        lambda f: shutil.copy(f.joinpath(TAG, *BIAS) / "fp32.pt", f.joinpath(TAG, *BIAS) / "momentum.pt"),
        "up.bias holds .*momentum.pt",
    ),
    "no step": (lambda f: (f.joinpath(TAG, *BIAS) / "step.pt").unlink(), "optimizer's step is None"),
    "code": (rewrite(lambda c: c.update(harm=Harmful()), *BIAS, "exp_avg.pt"), "nothing of it was executed"),
    "short": (rewrite(lambda c: c.update(param=torch.ones(6)), *BIAS, "fp32.pt"), "no tensor of 7 floats"),
    "no numbers": (
        rewrite(lambda c: c.update(param=torch.ones(1).expand(7)), *BIAS, "fp32.pt"),
        "no tensor of 7 floats",
    ),
    "a way out": (
        rewrite(lambda c: c["param_shapes"][1].update({"../../x": torch.Size([7])}), MODEL),
        r"'../../x', which cannot be the name of a folder",
    ),
    "other groups": (rewrite(lambda c: c["param_shapes"].pop(), MODEL), "not of one save"),
    "another optimizer": (
        rewrite(lambda c: c["param_groups"][0].update(max_coeff=10.0), "zero", "optimizer_state.pt"),
        "only Adam and AdamW",
    ),
    "tensor parallelism": (
        lambda f: shutil.copy(f / TAG / MODEL, f / TAG / MODEL.replace("00", "01")),
        "tensor parallelism",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_input_is_one_line_and_leaves_nothing(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(DATA / "stage2", source)
    edit, message = DAMAGES[damage]
    edit(source)
    with pytest.raises(CheckpointError, match=message):
        from_universal(source, tmp_path / "converted")
    assert main(["convert", "from-universal", str(source), str(tmp_path / "converted")]) == 1
    assert capsys.readouterr().err.startswith("hf-zero convert from-universal: error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["stage2", "stage3"])
def test_no_content_is_a_traceback(name: str, tmp_path: Path) -> None:
    """Every entry of every file of the run in turn is something else: that is refused, or it does not matter."""
    junk = [None, torch.zeros(3), {"a": 1}, [[]], True, torch.eye(3).to_sparse()]
    refused = 0
    for file in sorted((DATA / name / TAG).glob("*_00_model_states.pt")) + [
        DATA / name / TAG / "zero/optimizer_state.pt"
    ]:
        for number, place in enumerate(places(load_pickle(file, STAND_INS))):
            if name == "stage3" and len(place) > 2:  # as at stage 2
                continue

            def load(path: Path, stand_ins: Any, file: Path = file, place: Any = place, new: int = number) -> Any:
                held = inner = load_pickle(path, stand_ins)
                if path == file:
                    for key in place[:-1]:
                        inner = inner[key]
                    inner[place[-1]] = junk[new % len(junk)]
                return held

            with mock.patch("hf_zero.conversion.universal.load_pickle", load):
                try:
                    from_universal(DATA / name, tmp_path / "out")
                    shutil.rmtree(tmp_path / "out")
                except CheckpointError as error:
                    assert str(DATA / name) in str(error)
                    refused += 1
    assert refused > 15
    assert not list(tmp_path.iterdir())


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, universal = str(tmp_path / "ours"), str(tmp_path / "universal")
    assert main(["convert", "from-universal", str(DATA / "stage3"), ours, "--tag", TAG]) == 0
    assert "step 3, stage 3, 2 ranks, 5 parameters of 137 elements" in capsys.readouterr().out
    assert main(["convert", "to-universal", ours, universal]) == 0
    printed = capsys.readouterr().out
    assert 'state["step"] = state["step"].clone()' in printed
    assert "no buffers (1) and no frozen parameters (1)" in printed
    assert "stage 3 does not take lr, weight_decay" in printed
    assert main(["convert", "to-universal", ours, universal]) == 1
    assert "exists: name a new folder" in capsys.readouterr().err
    assert main(["convert", "from-universal", ours, str(tmp_path / "again")]) == 1
    assert "is a checkpoint of hf_zero already" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["ours", "universal"]
    assert json.loads((tmp_path / "ours" / "zero" / "manifest.json").read_text())["client_state"] == {"epoch": 3}


@pytest.mark.parametrize("way", ["to-universal", "to-dcp"])
def test_a_full_disk_is_one_line(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = str(tmp_path / "ours")
    assert main(["convert", "from-universal", str(DATA / "stage3"), ours, "--tag", TAG]) == 0
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limit[1]))  # in the middle of torch's files
    try:
        status = main(["convert", way, ours, str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    said = capsys.readouterr().err.strip()
    assert status == 1 and said.splitlines()[-1].startswith(
        f"hf-zero convert {way}: error: cannot write {tmp_path}/out"
    )
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == ["ours"]
