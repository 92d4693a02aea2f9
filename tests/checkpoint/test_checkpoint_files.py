"""Checkpoint folders: any layout reads what any other wrote, and damage is named."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hf_zero.checkpoint.folders import chosen, holds_nothing, newest_complete_checkpoint, read_manifest, tagged
from hf_zero.checkpoint.format import FORMAT_VERSION, SaveInfo, TensorInfo, encode_manifest, manifest_path, zero_folder
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.checkpoint.writer import SliceState, build_manifest, check_info, commit, prepare_folder, write_rank_file
from hf_zero.errors import CheckpointError
from hf_zero.layout import UnitLayout
from tests.harness.checkpoints import assert_holds, assert_same, cut, make_model, save, save_info
from tests.harness.ranks import run_ranks

WORLDS = [1, 2, 3, 4]
BUCKETS = [None, 8, 40]


# -------------------------------------------------------------------- round trips
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_any_layout_reads_any_other(tmp_path: Path, world_size: int, bucket: int | None) -> None:
    model = make_model(world_size)
    info = save(tmp_path, model, world_size, bucket)
    with open_checkpoint(tmp_path) as reader:
        num_cut = 0
        for other_world in WORLDS:
            for other_bucket in (None, 24):
                layouts = model.layouts(other_world, other_bucket)
                reader.check_against(layouts)
                for layout in layouts:
                    for run in (run for rank in range(other_world) for run in layout.slices(rank)):
                        assert dict(reader.kinds(run.name)).keys() == model.state[run.name].keys()
                        for kind, tensor in model.state[run.name].items():
                            assert_same(reader.read(run.name, kind, run), cut(tensor, run))
                        num_cut += len(run.pieces) > 1
        assert num_cut > 10, "vacuous: buckets cut no parameter"
    assert_holds(tmp_path, model)
    manifest = read_manifest(tmp_path)
    assert manifest.layouts == info.layouts
    assert manifest.client_state == info.client_state
    assert manifest.converted_from == info.converted_from
    assert [*manifest.param_groups] == [{"lr": 1e-3, "betas": [0.9, 0.999], "foreach": None}]
    assert (manifest.stage, manifest.global_step, manifest.world_size) == (3, 20, world_size)


def test_weights_are_read_in_the_type_asked_for(tmp_path: Path) -> None:
    model = make_model()
    save(tmp_path, model, 3, 16)
    with open_checkpoint(tmp_path) as reader:
        for name, param in model.params.items():
            stored = model.state[name].get("master", param)
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                assert_same(reader.read_full(name, dtype), stored.to(dtype))
            assert dict(reader.scalars(name)) == (model.scalars.get(name, {}) if param.numel() else {})
        assert_same(reader.read_full("head.weight", torch.float32), model.state["root.p0"]["master"])


def test_own_layout_is_one_read_per_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    save(tmp_path, model, 2, 16)
    run = max((run for layout in model.layouts(2, 16) for run in layout.slices(1)), key=lambda run: len(run.pieces))
    assert len(run.pieces) > 1
    with open_checkpoint(tmp_path) as reader:
        reader.read(run.name, next(iter(model.state[run.name])), run)  # header and all
        calls = []
        preadv = os.preadv

        def counted(*args: Any) -> int:
            calls.append(args)
            return preadv(*args)

        monkeypatch.setattr(os, "preadv", counted)
        reader.read(run.name, next(iter(model.state[run.name])), run)
    assert len(calls) == 1


def test_rank_files_are_plain_safetensors(tmp_path: Path) -> None:
    model = make_model()
    save(tmp_path, model, 2)
    assert sorted(path.name for path in zero_folder(tmp_path).iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    keys: set[str] = set()
    for rank in range(2):
        path = zero_folder(tmp_path) / f"rank-{rank:05d}.safetensors"
        with safe_open(path, "pt") as file:
            keys.update(file.keys())
            for key in file.keys():  # noqa: SIM118
                assert file.get_tensor(key).dim() == 1
        header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
        del header["__metadata__"]
        for entry in header.values():
            begin, end = entry["data_offsets"]
            assert not entry["shape"][0] or begin % ((end - begin) // entry["shape"][0]) == 0, "not aligned"
    assert {"root.p0::master", "embedding.p0::param", "mask::buffer"} <= keys


def test_non_contiguous_tensors_are_written(tmp_path: Path) -> None:
    layout = UnitLayout.build("u", {"w": (6,)}, dtype="float32", trainable=True, world_size=1)
    strided = torch.arange(12.0)[::2]
    prepare_folder(tmp_path)
    record = write_rank_file(tmp_path, 0, [SliceState(layout.slices(0)[0], {"master": strided})])
    info = SaveInfo(world_size=1, stage=0, layouts=(layout,), params=(TensorInfo("w", (6,), "float32"),))
    commit(tmp_path, build_manifest(info, [record]), {})
    with open_checkpoint(tmp_path) as reader:
        assert_same(reader.read_full("w", torch.float32), strided.contiguous())


def write_and_read_in_little_memory(folder: Path) -> None:
    layout = UnitLayout.build("u", {"w": (25_000_000,)}, dtype="float32", trainable=True, world_size=1)
    run = layout.slices(0)[0]
    state = SliceState(run, {"master": torch.rand(run.numel), "exp_avg": torch.rand(2 * run.numel)[::2]})
    info = SaveInfo(world_size=1, stage=0, layouts=(layout,), params=(TensorInfo("w", (run.numel,), "float32"),))
    lines = Path("/proc/self/status").read_text().splitlines()
    used = int(next(line for line in lines if line.startswith("VmData")).split()[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (80 << 20), resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="allocate"):
        state.tensors["master"].clone()  # 100 MB: not vacuous
    prepare_folder(folder)
    commit(folder, build_manifest(info, [write_rank_file(folder, 0, [state])]), {})
    with open_checkpoint(folder) as reader:
        reader.verify()
        resource.setrlimit(resource.RLIMIT_DATA, (used + (180 << 20), resource.RLIM_INFINITY))
        for kind in ("master", "exp_avg"):
            assert torch.equal(reader.read("w", kind, run), state.tensors[kind])


@pytest.mark.slow
def test_neither_writing_nor_reading_holds_a_second_copy(tmp_path: Path) -> None:
    # In a fresh process: the heap of this one may have room for copies, from the tests before.
    run_ranks(write_and_read_in_little_memory, 1, tmp_path, init_group=False)


# -------------------------------------------------------------------- what is refused
def test_missing_manifest_offers_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    model = make_model()
    for step in (5, 10, 15, 20):
        save(tmp_path / f"checkpoint-{step}", model, 2)
    manifest_path(tmp_path / "checkpoint-20").unlink()  # killed between the rank files and the manifest
    (zero_folder(tmp_path / "checkpoint-15") / "rank-00001.safetensors").unlink()
    # Its files have their sizes, and no header.
    shutil.copytree(tmp_path / "checkpoint-10", tmp_path / "checkpoint-12")
    other = zero_folder(tmp_path / "checkpoint-12") / "rank-00001.safetensors"
    other.write_bytes(b"\0" * other.stat().st_size)
    changed = read_manifest(tmp_path / "checkpoint-10")
    later = dataclasses.replace(changed, saved_at=changed.saved_at + 1e6)
    manifest_path(tmp_path / "checkpoint-12").write_bytes(encode_manifest(later))
    with pytest.raises(CheckpointError, match=r"checkpoint-20/zero/manifest.json is missing.* is .*checkpoint-10\.$"):
        open_checkpoint(tmp_path / "checkpoint-20")
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is missing .*checkpoint-10\.$"):
        open_checkpoint(tmp_path / "checkpoint-15")
    with pytest.raises(CheckpointError, match=r"inside it is .*checkpoint-10\.$"):
        open_checkpoint(tmp_path)
    assert newest_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert newest_complete_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match=r"manifest.json is missing\.$"):
        open_checkpoint(tmp_path / "checkpoint-5" / "zero")


def test_folders_of_other_tools_are_named_with_the_command_that_reads_them(tmp_path: Path) -> None:
    deepspeed = Path(__file__).parents[1] / "conversion" / "data" / "stage2"
    (tmp_path / ".metadata").touch()
    for folder, command in (
        (deepspeed / "global_step3", "from-deepspeed"),
        (deepspeed / "global_step3_universal", "from-universal"),
        (tmp_path, "from-dcp"),
    ):
        for look in (read_manifest, holds_nothing):
            with pytest.raises(CheckpointError, match=f"hf-zero convert {command} {folder} {folder}-converted"):
                look(folder)
    for call in (partial(tagged, "a\0b", None, "x"), partial(chosen, "a\0b"), partial(chosen, "a", "b\0")):
        with pytest.raises(CheckpointError, match="expected the path of one"):
            call()


def test_all_missing_and_truncated_files_are_listed(tmp_path: Path) -> None:
    save(tmp_path, make_model(), 4)
    files = [zero_folder(tmp_path) / f"rank-{rank:05d}.safetensors" for rank in range(4)]
    files[1].unlink()
    os.truncate(files[3], files[3].stat().st_size - 1)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert f"{files[1]} is missing" in str(caught.value)
    assert f"{files[3]} is damaged" in str(caught.value)
    assert str(files[0]) not in str(caught.value)


def test_changed_bytes_are_found(tmp_path: Path) -> None:
    save(tmp_path, make_model(), 3)
    path = zero_folder(tmp_path) / "rank-00001.safetensors"
    flip_byte(path, path.stat().st_size - 3)
    with open_checkpoint(tmp_path) as reader:
        reader.verify(0, 3)
        with pytest.raises(CheckpointError, match=f"{path} is damaged: wrong checksum, block 0 of embedding"):
            reader.verify(1, 3)
        with pytest.raises(CheckpointError, match=str(path)):
            reader.verify()
    flip_byte(path, 20)  # in the header
    with open_checkpoint(tmp_path) as reader, pytest.raises(CheckpointError, match=f"{path} is damaged"):
        for name, kinds in make_model().state.items():
            for kind in reader.kinds(name):
                whole = UnitLayout.build("x", {name: kinds[kind].shape}, dtype="", trainable=True, world_size=1)
                reader.read(name, kind, whole.slices(0)[0])


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x55]))


def test_damaged_manifests_are_refused(tmp_path: Path) -> None:
    save(tmp_path, make_model(), 2)
    path = manifest_path(tmp_path)
    content = path.read_bytes()
    for damaged, message in (
        (content[:-40], "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[]", "not a JSON object"),
        (b"{}", "checksum"),
        (content.replace(b'"global_step": 20', b'"global_step": 21'), "checksum is wrong"),
        (content.replace(b'"format_version": 2', b'"format_version": 99'), "format version 99.*upgrade"),
    ):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(tmp_path)
        assert str(path) in str(caught.value)
    path.write_bytes(content)
    manifest = read_manifest(tmp_path)
    path.write_bytes(encode_manifest(replace(manifest, world_size=3)))
    with pytest.raises(CheckpointError, match="contradicts itself"):
        open_checkpoint(tmp_path)
    assert (manifest.format_version, FORMAT_VERSION) == (2, 4), "keep a fixture of the old format, and adapt this test"


def test_every_difference_to_the_model_is_listed(tmp_path: Path) -> None:
    model = make_model()
    save(tmp_path, model, 2)
    shapes: dict[str, tuple[int, ...]] = {name: tuple(param.shape) for name, param in model.params.items()}
    del shapes["root.p2"]
    shapes |= {"new.bias": (3,), "root.p3": (99,), "head.weight": shapes.pop("root.p0")}
    layout = UnitLayout.build("all", shapes, dtype="float32", trainable=True, world_size=1)
    with open_checkpoint(tmp_path) as reader:
        with pytest.raises(CheckpointError) as caught:
            reader.check_against([layout])
        text = str(caught.value)
        assert "3 differences" in text
        assert "new.bias: not in the checkpoint" in text
        assert "root.p3: shape (99,) in the model" in text
        assert "root.p2: not in the model" in text
        run = layout.slices(0)[0]
        calls: tuple[Callable[[], torch.Tensor], ...] = (
            lambda: reader.read("unknown", "master", run),
            lambda: reader.read("root.p0", "momentum_buffer", run),
            lambda: reader.read_buffer("unknown"),
        )
        for call in calls:
            with pytest.raises(CheckpointError, match="holds no"):
                call()


def test_what_is_not_json_is_refused_before_anything_is_written() -> None:
    model = make_model()
    info = save_info(
        model,
        model.layouts(1),
        param_groups=[{"lr": torch.tensor(1.0), "b": {1: 2}}],
        lr_scheduler={"a": [torch.zeros(1)]},
    )
    with pytest.raises(CheckpointError) as caught:
        check_info(info)
    for where in (
        "lr_scheduler['a'][0] (Tensor)",
        "the key 1 of param_groups[0]['b']",
        "param_groups[0]['lr'] (Tensor)",
    ):
        assert where in str(caught.value)


def test_an_incomplete_or_placeholder_state_is_never_published(tmp_path: Path) -> None:
    model = make_model()
    layouts = model.layouts(2)
    prepare_folder(tmp_path)
    records = [write_rank_file(tmp_path, rank, model.rank_states(layouts, rank)[rank:]) for rank in range(2)]
    lost = layouts[0].slices(1)[0].name
    with pytest.raises(AssertionError, match=f"{lost}: .* of .* elements"):
        build_manifest(save_info(model, layouts), records)
    with pytest.raises(AssertionError, match="records of ranks"):
        build_manifest(save_info(model, layouts), records[:1])
    state = next(state for state in model.rank_states(layouts, 0) if state.slice.numel > 1)
    placeholder = torch.full((1,), float("nan")).expand(state.slice.numel)
    for tensor, message in ((placeholder, "placeholder"), (torch.zeros(state.slice.numel + 1), "shape")):
        with pytest.raises(AssertionError, match=message):
            write_rank_file(tmp_path, 0, [replace(state, tensors={"master": tensor})])
