"""Manifests that were edited and have a right checksum: an error that names the file, or a right result.

Many seeded edits of a real manifest, each read by the package, by `inspect` and by the stand-alone script.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint.consolidate import consolidate
from hf_zero.checkpoint.format import ConsolidateError, manifest_path
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.main import main
from tests.checkpoint.test_resume import start, steps
from tests.harness.checkpoints import WholeModel, assert_same, make_model, save
from tests.harness.ranks import run_ranks

ODD: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        3,
        2**31,
        2**63,
        2**70,
        -(2**70),
        0.5,
        1e300,
        float("inf"),
        float("nan"),
        10**30,
    ),
    *("", "x", "a\0b", "../x", "/etc/passwd", "rank-00000.safetensors", "rank-00001.safetensors", "\ud800", "float32"),
    *("param", "master", [], {}, [[]], [1], [-1], [2**40, 2**40], {"x": 1}, {"name": "x"}, "crc32", "1", "root.p0"),
]
EDITS_EACH = 100
VERSION_1 = Path(__file__).parent / "data" / "version_1"  # make_model(3), by 2 ranks
DEEP = "[" * 100_000 + "]" * 100_000


def write(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest with the checksum that its content has."""
    content = {key: value for key, value in content.items() if key != "crc32"}
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode("ascii"))
    manifest_path(folder).write_text(json.dumps({**content, "crc32": crc32}))


def containers(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every object and list in the content, with where it is."""
    if isinstance(value, dict | list):
        yield where, value
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from containers(item, f"{where}/{key}")


def edit(content: dict[str, Any], rng: random.Random, keys: Collection[str] = ()) -> str:
    """Change one place, under one of `keys` if any are given; say what was done."""
    # The top level is small: its own keys, and lists and objects below, come as often as the many slots do.
    key = rng.choice([key for key in content if key != "crc32" and (not keys or key in keys)])
    below = list(containers(content[key], key))
    if not below or rng.random() < 0.25:
        where, place = "", content
        slot: Any = key
    else:
        where, place = rng.choice(below)
        if not place:
            return f"{where} is empty"
        slot = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    value, kind = place[slot], rng.choice(["odd", "odd", "remove", "twice", "swap", "number", "rename", "other"])
    if kind == "remove":
        del place[slot]
    elif kind == "twice" and isinstance(place, list):
        place.insert(rng.randrange(len(place) + 1), copy.deepcopy(value))
    elif kind == "swap" and isinstance(place, list):
        other = rng.randrange(len(place))
        place[slot], place[other] = place[other], place[slot]
    elif kind == "rename" and isinstance(place, dict):
        name = rng.choice([slot + "x", "x", "", "root.p0", "root.p1", *list(place)])
        place[name] = place.pop(slot)
    elif kind == "number" and type(value) in (int, float):
        place[slot] = rng.choice([value + 1, value - 1, 2 * value, -value, value // 2, value + 8, float(value)])
    elif kind == "other":  # a value from another place of the same manifest
        place[slot] = copy.deepcopy(rng.choice([item for _, item in containers(content)]))
    else:
        place[slot] = copy.deepcopy(rng.choice(ODD))
    return f"{kind} {where}/{slot}: {str(value)[:60]}"


def read_all(folder: Path, model: WholeModel) -> None:
    """Read the checkpoint by the package: all of it, and it is that of the model."""
    with open_checkpoint(folder) as reader:
        reader.verify()
        assert {info.name for info in reader.manifest.params} == model.params.keys()
        assert dict(reader.manifest.tied) == model.tied
        for name, param in model.params.items():
            assert set(reader.kinds(name)) == (set(model.state[name]) if param.numel() else set()), name
            weight = model.state[name].get("master", model.state[name].get("param"))
            assert weight is not None
            assert_same(reader.read_full(name, weight.dtype), weight)
        assert {info.name for info in reader.manifest.buffers} == model.buffers.keys()
        for name, buffer in model.buffers.items():
            assert_same(reader.read_buffer(name), buffer)


def consolidated(folder: Path, out: Path, want: dict[str, torch.Tensor]) -> None:
    out.unlink(missing_ok=True)
    try:
        consolidate(folder, out)
        found = load_file(out)
        assert found.keys() == want.keys()
        for name, tensor in want.items():
            assert_same(found[name], tensor)
        assert metadata(out) == {"format": "pt", "head.weight": "root.p0"}
    except ConsolidateError:
        assert not out.exists()
        raise


def metadata(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


def fails(call: Callable[[], Any], kind: type[Exception], label: str) -> bool:
    """Whether the call raised an error of this kind, in one line; any other error fails the test."""
    try:
        call()
    except kind as error:
        assert str(error).strip() and "\n" not in str(error), label
        return True
    except BaseException as error:
        raise AssertionError(label) from error
    return False


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 4))])
def test_an_edited_manifest_is_refused_or_read_right(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder, out = make_model(), tmp_path / "checkpoint", tmp_path / "out.safetensors"
    lr_scheduler = {"last_epoch": 3, "base_lrs": [1e-3]}
    guard = {"cur_scale": 1.0, "skipped_steps": 0}
    kinds = {"optimizer": "AdamW", "lr_scheduler_class": "StepLR"}
    save(folder, model, 2, 64, lr_scheduler=lr_scheduler, step_guard=guard, **kinds)
    original = json.loads(manifest_path(folder).read_bytes())
    consolidate(folder, out)
    want = load_file(out)
    rng = random.Random(seed)
    refused = 0
    for number in range(EDITS_EACH):
        content = copy.deepcopy(original)
        label = f"seed {seed}, edit {number}: {edit(content, rng)}"
        write(folder, content)
        by_package = fails(lambda: read_all(folder, model), CheckpointError, f"package: {label}")
        by_script = fails(lambda: consolidated(folder, out, want), ConsolidateError, f"script: {label}")
        assert by_package or not by_script, label  # the script reads less: no optimizer state
        status = main(["inspect", str(folder), "--verify"])
        said = capsys.readouterr()
        assert status == by_package, f"inspect: {label}\n{said.err}"
        assert len(said.err.splitlines()) == status, said.err
        assert main(["inspect", str(folder), "--json"]) in (0, status), label
        capsys.readouterr()
        refused += by_package
    capsys.readouterr()
    assert EDITS_EACH / 2 < refused < EDITS_EACH, "not vacuous: some edits change nothing that matters"


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file outside": lambda m: m["files"][0].update(name="../rank-00000.safetensors"),
    "an absolute file": lambda m: m["files"][1].update(name="/etc/passwd"),
    "NUL in a file": lambda m: m["files"][1].update(name="a\0b"),
    "files exchanged": lambda m: m["files"].reverse(),
    "version 0": lambda m: m.update(format_version=0),
    "version -1": lambda m: m.update(format_version=-1),
    "no world": lambda m: (m.update(world_size=0, files=[]), [unit.update(world_size=0) for unit in m["layouts"]]),
    "a parameter twice": lambda m: m["params"].append(m["params"][0]),
    "a place twice": lambda m: m["layouts"][0]["slots"].append(m["layouts"][0]["slots"][0]),
    "another shape": lambda m: transpose(m, [3, 5]),
    "another cut": lambda m: m["layouts"][0].update(bucket_numel=128),
    "another padding": lambda m: m["layouts"][0].update(padded_numel=m["layouts"][0]["padded_numel"] + 16),
    "another offset": lambda m: m["layouts"][0]["slots"][2].__setitem__(2, m["layouts"][0]["slots"][2][2] + 8),
    "a time": lambda m: m.update(saved_at=1e300),
    "a buffer's shape": lambda m: next(one for one in m["buffers"] if one["name"] == "mask").update(shape=[3, 2]),
    "a buffer less": lambda m: m["buffers"].pop(),
    "other tied": lambda m: m["tied"].update({"head.weight": "root.p1"}),
    "a kind less": lambda m: m["kinds"]["root.p0"].pop("exp_avg"),
    "a type": lambda m: m["kinds"]["root.p0"].update(exp_avg="int32"),
    "a step": lambda m: m["scalars"]["root.p0"].update(step="7"),
}


def transpose(content: dict[str, Any], shape: list[int]) -> None:
    """Transpose the shape in both places, so that the manifest does not contradict itself."""
    slot = next(slot for slot in content["layouts"][0]["slots"] if slot[1] == shape)
    info = next(info for info in content["params"] if info["name"] == slot[0])
    info["shape"] = slot[1] = shape[::-1]


# The script does not read optimizer state.
NOT_OF_THE_SCRIPT = {"a kind less", "a type"}


@pytest.mark.parametrize("what", EDITS)
def test_what_was_edited_is_named(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, make_model(), 2, 64)
    content = json.loads(manifest_path(folder).read_bytes())
    read_all(folder, make_model())
    EDITS[what](content)
    write(folder, content)
    with pytest.raises(CheckpointError, match=r"(manifest\.json|rank-0000\d\.safetensors) ") as caught:
        read_all(folder, make_model())
    assert "\n" not in str(caught.value)
    done = subprocess.run(
        [sys.executable, str(folder / "consolidate.py"), str(folder), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if what in NOT_OF_THE_SCRIPT:
        assert done.returncode == 0, done.stderr
    else:
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert done.stderr.startswith("error: ") and str(folder) in done.stderr


@pytest.mark.parametrize(
    "text", [DEEP, '{"a":' + DEEP + "}", '{"format_version": 1, "client_state": ' + DEEP + "}", "[1]", "1"]
)
def test_nested_beyond_all_measure(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, make_model(), 1)
    manifest_path(folder).write_text(text)
    assert fails(lambda: open_checkpoint(folder), CheckpointError, "package")
    assert fails(lambda: consolidate(folder, tmp_path / "out"), ConsolidateError, "script")


def test_files_from_before_the_marks_are_read(tmp_path: Path) -> None:
    """The first files of version 1 were written so: what contradicts itself is still found."""
    folder, model = tmp_path / "checkpoint", make_model(3)
    shutil.copytree(VERSION_1, folder)
    content = json.loads(manifest_path(folder).read_bytes())
    for file in content["files"]:
        path = folder / "zero" / file["name"]
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert header["__metadata__"].pop("layout")
        header["__metadata__"].pop("buffers", None)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
        path.write_bytes(data[:8] + text + data[8 + length :])
        file["crc32"] = zlib.crc32(path.read_bytes())
    write(folder, content)
    read_all(folder, model)
    consolidate(folder, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    content["layouts"][0]["slots"][2][2] += 8
    write(folder, content)
    assert fails(lambda: open_checkpoint(folder), CheckpointError, "package")
    assert fails(lambda: consolidate(folder, tmp_path / "out"), ConsolidateError, "script")


def resume_edited(folder: str, seed: int) -> int:
    """Return what an engine takes from a manifest, and no other reader does."""
    engine = start(1, seed=0)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder, "a")
    path = Path(folder, "a")
    original = json.loads(manifest_path(path).read_bytes())
    weights = engine.full_state_dict(keep=True)
    rng = random.Random(seed)
    refused = 0
    for number in range(100):
        content = copy.deepcopy(original)
        label = f"seed {seed}, edit {number}: " + edit(
            content, rng, ("param_groups", "extra", "scalars", "kinds", "global_step", "client_state")
        )
        write(path, content)
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            assert re.search("checkpoint|manifest|rank-00000", str(error)), f"{label}: {error}"
            refused += 1
        except BaseException as error:
            raise AssertionError(label) from error
        found = engine.full_state_dict(keep=True)
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items()), label
    write(path, original)
    engine.load_checkpoint(folder)
    steps(engine, 2, 3)
    return refused


@pytest.mark.parametrize("seed", range(2))
def test_a_resume_from_an_edited_manifest(seed: int, tmp_path: Path) -> None:
    [refused] = run_ranks(resume_edited, 1, str(tmp_path), seed)
    assert 20 < refused < 95
