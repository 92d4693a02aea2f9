"""Checkpoints as DeepSpeed's files: those that DeepSpeed itself wrote come out again, to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.reader import CheckpointReader, open_checkpoint
from hf_zero.conversion.dcp import HOW
from hf_zero.conversion.deepspeed import STAND_INS, convert
from hf_zero.conversion.pickles import StandIn, load_pickle
from hf_zero.conversion.to_deepspeed import to_deepspeed
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.main import main
from hf_zero.layout import Piece
from tests.harness.checkpoints import make_model, save

DATA = Path(__file__).with_name("data")
ADAMS = ("stage1", "stage2", "stage3", "stage2-bf16", "stage3-bf16", "stage2-fp16", "stage2-four-ranks")
ADAMS += ("stage3-four-ranks", "stage2-scheduler", "stage3-own-adam")
# A checkpoint of hf_zero does not know the configuration, and numbers that follow from it.
UNKNOWN = {"ds_config", "global_samples", "clip_grad", "raise_error_at_min_scale", "dtype", "step", *HOW}


def differences(got: Any, want: Any, where: str) -> list[str]:
    """Return where a value is not what DeepSpeed wrote."""
    if isinstance(want, torch.Tensor):
        same = got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)
        return [] if same else [f"{where}: {got} instead of {want}"]
    if isinstance(want, StandIn):
        return differences(vars(got), vars(want), where)
    if isinstance(want, Mapping):
        wrong = [f"{where}: {sorted(map(str, {*got} ^ {*want}))}"] if {*got} - UNKNOWN != {*want} - UNKNOWN else []
        common = [key for key in want if key in got and (key not in UNKNOWN or isinstance(want[key], torch.Tensor))]
        return wrong + [text for key in common for text in differences(got[key], want[key], f"{where}/{key}")]
    if isinstance(want, list | tuple) and len(got) == len(want):
        pairs = enumerate(zip(got, want, strict=True))
        return [text for index, (one, other) in pairs for text in differences(one, other, f"{where}/{index}")]
    return [] if got == want else [f"{where}: {got!r} instead of {want!r}"]


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Hyperparameters, which torch's Adam and DeepSpeed's name in different numbers."""
    return [{key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")} for group in optimizer]


def clear_padding(files: dict[str, dict[str, Any]], ranks: int) -> None:
    """Stage 3 cuts each parameter into equal parts, and leaves what fills up the last ones as it found the memory."""

    def clear(flat: torch.Tensor, shapes: Mapping[str, Any], rank: int) -> None:
        at = 0
        for shape in shapes.values():
            part = -(-math.prod(shape) // ranks)
            used = min(part, max(math.prod(shape) - rank * part, 0))
            flat.data[at + used : at + part] = 0
            at += part

    for rank in range(ranks):
        model = files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"]
        for name, fragment in model["frozen_param_fragments"].items():
            clear(fragment, {name: model["frozen_param_shapes"][name]}, rank)
        file = next(file for file in files if file.endswith(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
        flats = files[file]["optimizer_state_dict"]["fp32_flat_groups"]
        for flat, shapes in zip(flats, model["param_shapes"], strict=True):
            clear(flat, shapes, rank)


@pytest.mark.parametrize("name", ADAMS)
def test_files_of_deepspeed_come_out_again(name: str, tmp_path: Path) -> None:
    summary = convert(DATA / name, tmp_path / "ours")
    written = to_deepspeed(tmp_path / "ours", tmp_path / "theirs")
    tag = (DATA / name / "latest").read_text().strip()
    assert (tmp_path / "theirs" / "latest").read_text() == tag
    files = sorted(path.name for path in (DATA / name / tag).glob("*.pt"))
    assert sorted(path.name for path in written.folder.iterdir()) == files and len(files) > 2
    assert summary.global_step == 3
    folders = (written.folder, DATA / name / tag)
    got, want = ({file: load_pickle(folder / file, STAND_INS) for file in files} for folder in folders)
    for side in (got, want):
        if "stage3" in name:
            clear_padding(side, summary.world_size)
        for held in side.values():
            states = held.get("optimizer_state_dict", {})
            base = states.get("base_optimizer_state", states.get("optimizer_state_dict"))
            if base is not None:
                base["param_groups"] = options_of(base["param_groups"])
    assert differences(got, want, "") == []


def everything(reader: CheckpointReader) -> dict[str, torch.Tensor]:
    found = {}
    for info in reader.manifest.params:
        for kind in reader.kinds(info.name):
            found[f"{info.name}::{kind}"] = reader.read(
                info.name, kind, [Piece(info.name, 0, math.prod(info.shape), 0, 0)]
            )
        for key, value in reader.scalars(info.name).items():
            found[f"{info.name}::{key}"] = torch.tensor(value)
    return found | {info.name: reader.read_buffer(info.name) for info in reader.manifest.buffers}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_any_stage_and_world_size(stage: int, world_size: int, tmp_path: Path) -> None:
    """The checkpoint goes through DeepSpeed's layout at another stage and world size, which the reader of its files
    understands.
    """
    convert(DATA / "stage2", tmp_path / "ours")
    line = ["convert", "to-deepspeed", str(tmp_path / "ours"), str(tmp_path / "theirs")]
    assert main([*line, "--stage", str(stage), "--world-size", str(world_size)]) == 0
    summary = convert(tmp_path / "theirs", tmp_path / "again")
    assert (summary.stage, summary.world_size) == (stage, world_size)
    with open_checkpoint(tmp_path / "ours") as first, open_checkpoint(tmp_path / "again") as second:
        want, got = everything(first), everything(second)
        assert first.manifest.client_state == second.manifest.client_state == {"epoch": 3}
        assert first.manifest.tied == second.manifest.tied or stage == 3
    assert got.keys() == want.keys() and len(want) > 10
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def test_the_loss_scale_goes_along(tmp_path: Path) -> None:
    convert(DATA / "stage2-fp16", tmp_path / "ours")
    written = to_deepspeed(tmp_path / "ours", tmp_path / "theirs")
    assert any("loss scale" in remark for remark in written.remarks)
    path = written.folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states = load_pickle(path, STAND_INS)["optimizer_state_dict"]
    assert states["dynamic_loss_scale"] and vars(states["loss_scaler"])["cur_scale"] == 16


def test_what_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "sgd", make_model(0), 1, optimizer="SGD", param_groups=[{"lr": 1.0}])
    with pytest.raises(CheckpointError, match="was saved with SGD: a checkpoint of DeepSpeed holds Adam and AdamW"):
        to_deepspeed(tmp_path / "sgd", tmp_path / "out")
    convert(DATA / "stage2", tmp_path / "ours")
    with pytest.raises(CheckpointError, match="stage 2 on 0 ranks: expected stage 1, 2 or 3 on 1 rank or more"):
        to_deepspeed(tmp_path / "ours", tmp_path / "out", world_size=0)
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob("out.*")]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    assert main(["convert", "to-deepspeed", str(tmp_path / "ours"), str(tmp_path / "there")]) == 1
    assert "exists: name a new folder" in capsys.readouterr().err


def test_a_sub_group_ends_where_deepspeeds_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed wrote these files with sub_group_size 20."""
    monkeypatch.setattr("hf_zero.conversion.to_deepspeed._SUB_GROUP", 20)
    test_files_of_deepspeed_come_out_again("stage3-subgroups", tmp_path)
    file = DATA / "stage3-subgroups" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert len(load_pickle(file, STAND_INS)["optimizer_state_dict"]["fp32_flat_groups"]) > 2
