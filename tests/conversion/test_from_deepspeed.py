"""Checkpoints of DeepSpeed itself (data/, made by scripts/make_deepspeed_checkpoints.py) go on under hf_zero."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint.client_state import decode_client_state
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.conversion.deepspeed import STAND_INS, convert
from hf_zero.conversion.pickles import load_pickle
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.main import main
from hf_zero.layout import Piece
from tests.conversion import trainer_run
from tests.conversion.tiny_model import STEPS_AFTER, STEPS_BEFORE, batch, groups, tiny_model
from tests.harness.ranks import run_ranks

DATA = Path(__file__).parent / "data"
RUNS = sorted(path.name for path in DATA.iterdir())
FP32_RUNS = [name for name in RUNS if not name.endswith("16")]
FILES = "global_step3"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def go_on(folder: str, name: str, stage: int) -> dict[str, Any]:
    model = tiny_model(seed=1)  # of other weights and another buffer
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "bf16": {"enabled": name.endswith("bf16")},
        "fp16": {"enabled": name.endswith("fp16"), "initial_scale_power": 1},
        "gradient_clipping": 0.5,
    }
    if name == "stage2-scheduler":
        params = {"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 6, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    # The rates are the checkpoint's.
    optimizer = torch.optim.AdamW(groups(model), lr=1.0)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    client_state = engine.load_checkpoint(folder)[1]
    first, losses = engine.global_steps, []
    for step in range(first, first + STEPS_AFTER):
        loss = engine(batch(step, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    engine.teardown()
    return {"losses": losses, "first": first, "client_state": client_state}


def go_on_all(folder: str, runs: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [go_on(f"{folder}/{name}", name, stage) for name, stage in runs]


def go_on_from(names: list[str], tmp_path: Path, world_size: int) -> list[tuple[str, dict[str, Any], list[float]]]:
    """(name, what hf_zero found, DeepSpeed's losses) of each checkpoint."""
    for name in names:
        convert(DATA / name, tmp_path / name)
    runs = [(name, int(name[5]) if world_size == 2 else 2) for name in names]
    found = run_ranks(go_on_all, world_size, str(tmp_path), runs)[0]
    wanted = [json.loads((DATA / name / "losses.json").read_text()) for name in names]
    return list(zip(names, found, wanted, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_next_losses_are_deepspeeds(world_size: int, tmp_path: Path) -> None:
    for name, found, wanted in go_on_from(FP32_RUNS, tmp_path, world_size):
        assert found["first"] == STEPS_BEFORE, name
        assert found["client_state"] == {"epoch": 3}, name
        assert found["losses"] == pytest.approx(wanted, abs=1e-5, rel=0), name
        assert max(wanted) - min(wanted) > 1e-2, f"vacuous: nothing was trained in {name}"


def test_runs_in_16_bits_go_on(tmp_path: Path) -> None:
    """Both round on the way, in other places: the losses are as near as that allows."""
    for name, found, wanted in go_on_from(["stage3-bf16", "stage2-fp16"], tmp_path, world_size=2):
        assert found["losses"] == pytest.approx(wanted, rel=2e-2), name


@pytest.mark.parametrize("name", RUNS)
def test_every_weight_and_state_is_what_deepspeed_holds(name: str, tmp_path: Path) -> None:
    convert(DATA / name, tmp_path / "converted")
    expected = load_file(DATA / name / "expected.safetensors")
    assert len(expected) == 12, "vacuous: four parameters with two states each"
    with open_checkpoint(tmp_path / "converted") as reader:
        reader.verify()
        for key, wanted in expected.items():
            param, _, kind = key.partition("::")
            found = reader.read(param, kind, [Piece(param, 0, wanted.numel(), 0, 0)])
            assert found.dtype == torch.float32
            assert torch.equal(found, wanted.flatten()), key
            assert reader.scalars(param) == {"step": float(STEPS_BEFORE)}
        model = tiny_model(seed=0)
        assert torch.equal(reader.read_buffer("gain"), model.gain)
        frozen = reader.read_full("frozen", torch.float32)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name[-4:], torch.float32)
        assert torch.equal(frozen, model.frozen.detach().to(dtype).float())
        assert reader.manifest.tied == {"head.weight": "embed.weight"}
        assert [group["weight_decay"] for group in reader.manifest.param_groups] == [0.1, 0.0]


def resume_trainer(folder: str) -> list[list[float]]:
    """The losses of all steps, at stages 2 and 3."""
    found = []
    for stage in (2, 3):
        zero = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10}}
        classes = hf_zero.TrainingArguments, hf_zero.Trainer
        found.append(trainer_run.train(*classes, f"{folder}/out", folder, zero=zero))
    return found


def test_a_run_of_trainer_goes_on(tmp_path: Path) -> None:
    """The run has the random states, the data and the rates of the one before: the losses are those that DeepSpeed
    had.
    """
    source = DATA.with_name("trainer_data")
    convert(source / "checkpoint-3" / FILES, tmp_path / "checkpoint-3")
    wanted = json.loads((source / "losses.json").read_text())
    for found in run_ranks(resume_trainer, 2, str(tmp_path / "checkpoint-3"), init_group=False, timeout=120)[0]:
        assert found == pytest.approx(wanted, abs=1e-5, rel=0)
    assert wanted[-1] < wanted[trainer_run.SAVED_AT] - 0.1, "vacuous: nothing was trained"


# -------------------------------------------------------------------- bad input
class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


def rewrite(change: Callable[[dict[str, Any]], Any], *path: str) -> Callable[[Path], None]:
    """Load a file of the checkpoint, change its content, and write it back without objects of DeepSpeed's classes."""

    def edit(folder: Path) -> None:
        file = folder.joinpath(*path)
        content = load_pickle(file, STAND_INS)
        for key in ("loss_scaler", "param_slice_mappings"):
            content.get("optimizer_state_dict", {}).pop(key, None)
        change(content)
        torch.save(content, folder / "new")  # the file is mapped
        (folder / "new").replace(file)

    return edit


def flip_a_byte(folder: Path) -> None:
    file = folder / FILES / OPTIM.format(1)
    data = bytearray(file.read_bytes())
    start = data.index(b"data/0") + 100
    data[start] ^= 1
    file.write_bytes(data)


def cut(folder: Path) -> None:
    file = folder / FILES / OPTIM.format(0)
    file.write_bytes(file.read_bytes()[:-1000])


def base(content: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = content["optimizer_state_dict"]["base_optimizer_state"]
    return state


RANK_1 = (FILES, OPTIM.format(1))
RANK_0 = (FILES, OPTIM.format(0))
MODEL = (FILES, "mp_rank_00_model_states.pt")
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no optimizer files": (lambda f: [p.unlink() for p in f.rglob("*optim*")], "no ZeRO checkpoint of DeepSpeed"),
    "rank 0 missing": (lambda f: (f / FILES / OPTIM.format(0)).unlink(), "lacks the files of 1 ranks: zero_pp_rank_0"),
    "rank 1 missing": (
        lambda f: (f / FILES / OPTIM.format(1)).unlink(),
        "the files of 1 ranks, .* written by 2",
    ),
    "a rank too many": (
        lambda f: shutil.copy(f / FILES / OPTIM.format(1), f / FILES / OPTIM.format(2)),
        "the files of 3 ranks",
    ),
    "two saves": (
        lambda f: shutil.copy(f / FILES / OPTIM.format(1), f / FILES / ("bf16_" + OPTIM.format(1))),
        "files of two saves",
    ),
    "no model file": (lambda f: f.joinpath(*MODEL).unlink(), "cannot read .*mp_rank_00_model_states.pt: No such file"),
    "torn file": (cut, "cannot read .*zero_pp_rank_0.*Copy the file again"),
    "flipped byte": (flip_a_byte, "zero_pp_rank_1.*(checksum|cannot read)|cannot read .*zero_pp_rank_1"),
    "tensor parallelism": (
        lambda f: shutil.copy(f / FILES / OPTIM.format(1), f / FILES / OPTIM.format(1).replace("rank_00", "rank_01")),
        "tensor parallelism",
    ),
    "latest names nothing": (lambda f: (f / "latest").write_text("global_step9"), "latest names 'global_step9'"),
    "code in the pickle": (rewrite(lambda c: c.update(harm=Harmful()), *MODEL), "nothing of it was executed"),
    "another model": (
        rewrite(lambda c: c["param_shapes"][0].update({"up.weight": torch.Size([9, 5])}), *MODEL),
        "2 ranks hold .* and 135 are in the model",
    ),
    "absurd shape": (
        rewrite(lambda c: c["param_shapes"][0].update({"up.weight": torch.Size([1 << 40, 1 << 20])}), *MODEL),
        "param_shapes does not map names to shapes",
    ),
    "other groups": (rewrite(lambda c: c["param_shapes"].pop(), *MODEL), "not files of one save"),
    "ranks of two steps": (
        rewrite(lambda c: base(c)["state"][0]["step"].fill_(2), *RANK_1),
        "the ranks stand at steps",
    ),
    "a rank without states": (rewrite(lambda c: base(c)["state"].clear(), *RANK_1), "different states of group 0"),
    "a short state": (
        rewrite(lambda c: base(c)["state"][0].update(exp_avg=torch.zeros(9)), *RANK_0),
        "rank 0 holds 9 elements of exp_avg",
    ),
    "Lamb": (rewrite(lambda c: base(c)["param_groups"][0].update(max_coeff=10.0), *RANK_0), "only Adam and AdamW"),
    "momentum": (
        rewrite(lambda c: base(c)["state"].update({0: {"momentum_buffer": torch.zeros(64)}}), *RANK_0),
        "state is momentum_buffer: only that of Adam",
    ),
    "elastic": (
        rewrite(lambda c: c["optimizer_state_dict"].update(base_optimizer_state=[]), *RANK_0),
        "elastic_checkpoint",
    ),
    "not a ZeRO save": (rewrite(lambda c: c.update(param_shapes=None), *MODEL), "param_shapes is NoneType"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_bad_input_is_one_line_and_leaves_nothing(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(DATA / "stage2", source)
    edit, message = DAMAGES[damage]
    edit(source)
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "converted")
    assert main(["convert", "from-deepspeed", str(source), str(tmp_path / "converted")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("hf-zero convert from-deepspeed: error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every entry of nested dictionaries and lists, by its keys."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


@pytest.mark.parametrize("name", ["stage2", "stage3-subgroups"])
def test_no_content_is_a_traceback(name: str, tmp_path: Path) -> None:
    """Every entry of every file in turn is something else: that is refused, or it does not matter."""
    junk = [None, torch.zeros(3), {"a": 1}, [[]], True, torch.eye(3).to_sparse()]
    refused = 0
    for file in sorted((DATA / name / FILES).glob("*.pt")):
        for number, place in enumerate(places(load_pickle(file, STAND_INS))):

            def load(path: Path, stand_ins: Any, file: Path = file, place: Any = place, new: int = number) -> Any:
                content = inner = load_pickle(path, stand_ins)
                if path == file:
                    for key in place[:-1]:
                        inner = inner[key]
                    inner[place[-1]] = junk[new % len(junk)]
                return content

            with mock.patch("hf_zero.conversion.deepspeed.load_pickle", load):
                try:
                    convert(DATA / name, tmp_path / str(refused))
                    shutil.rmtree(tmp_path / str(refused))
                except CheckpointError as error:
                    assert str(DATA / name) in str(error)
                    refused += 1
    assert refused > 50
    assert not list(tmp_path.iterdir())


def test_target_that_exists_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "converted"
    target.mkdir()
    (target / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="exists: name a new folder"):
        convert(DATA / "stage2", target)
    assert [path.name for path in target.iterdir()] == ["mine"]
    (target / "mine").unlink()
    convert(DATA / "stage2", target)  # an empty folder is a place for a new one
    with pytest.raises(CheckpointError, match="is a checkpoint of hf_zero already"):
        convert(target, tmp_path / "again")


def test_client_state_keeps_what_json_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    shutil.copytree(DATA / "stage2", source)
    rewrite(lambda content: content.update(rng=torch.arange(3)), *MODEL)(source)
    assert main(["convert", "from-deepspeed", str(source), str(tmp_path / "converted")]) == 0
    assert "step 3, stage 2, 2 ranks, 5 parameters of 137 elements" in capsys.readouterr().out
    found = decode_client_state(open_checkpoint(tmp_path / "converted").manifest.client_state)
    assert [*found] == ["epoch", "rng"] and torch.equal(found["rng"], torch.arange(3))


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch("hf_zero.checkpoint.atomic_files.os.fsync", side_effect=full),
        pytest.raises(CheckpointError, match=r"cannot write .*No space left"),
    ):
        convert(DATA / "stage2", tmp_path / "converted")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["from-nowhere", "a", "b"], ["from-deepspeed", "a"]])
def test_bad_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["convert", *arguments])
    assert stop.value.code == 2
