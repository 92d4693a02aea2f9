"""Consolidation: the weights are those of the ranks bit for bit, in little memory, whole or not at all."""

from __future__ import annotations

import io
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hf_zero import layout
from hf_zero.checkpoint import consolidate as script
from hf_zero.checkpoint import stand_alone
from hf_zero.checkpoint.consolidate import Options, consolidate
from hf_zero.checkpoint.format import (
    CODES,
    ITEM_BYTES,
    ConsolidateError,
    load_manifest,
    manifest_path,
    segments,
    zero_folder,
)
from hf_zero.checkpoint.rank_reader import RankFiles
from tests.harness.checkpoints import WholeModel, assert_holds, assert_same, make_model, save

TORCH_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def expected(model: WholeModel, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    weights = {}
    for name, param in model.params.items():
        stored = model.state[name].get("master", model.state[name].get("param", param)) if param.numel() else param
        weights[name] = stored if dtype is None else stored.to(torch.float32).to(dtype)
    return {**weights, **model.buffers}


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Read the files that from_pretrained would find."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return dict(load_file(folder / "model.safetensors"))
    content = json.loads(index.read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name, file in content["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            tensors[name] = opened.get_tensor(name)
    assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert content["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in tensors.values())
    return tensors


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same(got[name], tensor)


# -------------------------------------------------------------------- what it repeats of the package
def test_its_arithmetic_is_that_of_the_layout() -> None:
    rng = random.Random(0)
    num_cut = 0
    for _ in range(300):
        shapes = {f"p{i}": (rng.choice([0, 1, 2, 7, 8, 9, 63, 200]),) for i in range(rng.randrange(1, 8))}
        unit = layout.UnitLayout.build(
            "u",
            shapes,
            dtype="float32",
            trainable=True,
            world_size=rng.randrange(1, 9),
            max_bucket_numel=rng.choice([None, 1, 8, 30, 100]),
        )
        starts = {(run.name, rank): run.shard_offset for rank in range(unit.world_size) for run in unit.slices(rank)}
        for slot in unit.slots:
            got = segments(unit, slot.name)
            want = [
                (owned.rank, owned.piece.shard_offset - starts[slot.name, owned.rank], owned.piece.numel)
                for owned in unit.locate(slot.name)
            ]
            assert got == want
            start, end = sorted(rng.randrange(slot.numel + 1) for _ in range(2))
            want = [
                (owned.rank, owned.piece.shard_offset - starts[slot.name, owned.rank], owned.piece.numel)
                for owned in unit.locate(slot.name, start, end)
            ]
            assert segments(unit, slot.name, start, end) == want
            num_cut += len(got) > 3
    assert num_cut > 100


def test_its_tables_are_those_of_the_package() -> None:
    for name, code in CODES.items():
        assert getattr(torch, name).itemsize == ITEM_BYTES[code]


# -------------------------------------------------------------------- the result
@pytest.mark.parametrize("bucket", [None, 8, 64])
@pytest.mark.parametrize("world_size", [2, 3])
def test_earlier_checkpoints_have_unaligned_parts(tmp_path: Path, world_size: int, bucket: int | None) -> None:
    model = make_model(world_size)
    info = save(tmp_path / "c", model, world_size, bucket, unaligned=True)
    assert any(one.padded_numel % (world_size * layout.ALIGN) for one in info.layouts)
    assert_holds(tmp_path / "c", model)
    consolidate(tmp_path / "c")
    assert_equal(read_folder(tmp_path / "c" / "consolidated"), expected(model))


@pytest.mark.parametrize("bucket", [None, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_are_the_masters_bit_for_bit(
    tmp_path: Path, world_size: int, bucket: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "CHUNK_BYTES", 64)  # several chunks in a tensor
    model = make_model(world_size)
    save(tmp_path / "c", model, world_size, bucket)
    summary = consolidate(tmp_path / "c")
    out = tmp_path / "c" / "consolidated"
    assert summary["out"] == str(out)
    assert_equal(read_folder(out), expected(model))
    assert "head.weight" not in read_folder(out), "tied: as transformers does, only the first name is written"
    assert summary["tensors"] == len(expected(model))
    assert summary["bytes"] == sum(tensor.nbytes for tensor in expected(model).values())

    consolidate(tmp_path / "c", tmp_path / "cut", Options(shard_bytes=300))
    assert len(list((tmp_path / "cut").glob("model-*-of-*.safetensors"))) > 5
    assert_equal(read_folder(tmp_path / "cut"), expected(model))


def test_threads_write_parts_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads write parts that begin and end inside blocks of rank files."""
    monkeypatch.setattr(script, "CHUNK_BYTES", mmap.PAGESIZE)
    masters = {"odd": torch.rand(3, 7), "big": torch.rand(700_001)}
    state = {name: {"master": master} for name, master in masters.items()}
    save(tmp_path / "c", WholeModel({"all": ("float32", True, list(masters))}, masters, state, {}, {}), 3, 120_000)
    threads = set()
    for name, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        out = tmp_path / f"{name}.safetensors"
        consolidate(tmp_path / "c", out, Options(dtype=name), lambda *_: threads.add(threading.get_ident()))
        assert_equal(load_file(out), {key: master.to(dtype or master.dtype) for key, master in masters.items()})
    assert len(threads) > 1
    tensors = {tensor.name: tensor for tensor in script.plan_tensors(load_manifest(tmp_path / "c"), Options())}
    for rank, at in ((0, -1), (1, -400_000), (2, -900_000)):  # of the tensor's first and last block of a file
        path = zero_folder(tmp_path / "c") / f"rank-{rank:05d}.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[len(content) + at + 1 :])
        with pytest.raises(ConsolidateError, match=f"{path} is damaged: wrong checksum"):
            consolidate(tmp_path / "c", tmp_path / "out.safetensors")
        assert not list(tmp_path.glob("out*"))
        files = RankFiles(tmp_path / "c", load_manifest(tmp_path / "c"))
        with (
            io.FileIO(tmp_path / "part", "w") as part,
            closing(files),
            pytest.raises(ConsolidateError, match=f"{path} is damaged: wrong checksum"),
        ):
            for key in masters:  # what a part reads it compares by itself, when it ends inside a block
                script.write_part(files, part, tensors[key], 2, masters[key].numel() - 1, 0, lambda count: None)
        path.write_bytes(content)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_dtype_rounds_as_torch_does(tmp_path: Path, dtype: str) -> None:
    model = make_model()
    save(tmp_path / "c", model, 3)
    consolidate(tmp_path / "c", tmp_path / "out", Options(dtype=dtype))
    assert_equal(read_folder(tmp_path / "out"), expected(model, TORCH_TYPES[dtype]))


def test_rounding_of_every_kind_of_value() -> None:
    """All signs, exponents (zero, denormal, infinite, NaN) and leading mantissa bits; ties and their neighbours."""
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = [0, 1, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    bits = np.concatenate([high | value for value in low])
    values = torch.from_numpy(bits.view(np.float32))
    nans = values.isnan()
    want = values.to(torch.bfloat16)
    got = torch.from_numpy(script.round_to_bf16(bits.view("<f4")).copy()).view(torch.bfloat16)
    assert torch.equal(got.isnan(), nans)
    assert torch.equal(got[~nans].view(torch.int16), want[~nans].view(torch.int16))
    for source, target in (("BF16", "F32"), ("BF16", "F16"), ("F32", "F16"), ("F64", "F32"), ("F64", "BF16")):
        typed = values.to(getattr(torch, script.TORCH_NAMES[source]))
        want = typed.float().to(getattr(torch, script.TORCH_NAMES[target]))
        fits = ~(want.isinf() & typed.isfinite())
        result = script.convert(typed[fits].view(torch.uint8).numpy(), source, target)
        got = torch.from_numpy(result.copy()).view(want.dtype)
        assert torch.equal(got.isnan(), nans[fits])
        assert torch.equal(got[~nans[fits]], want[fits][~nans[fits]])


def test_values_too_large_for_the_type_are_refused(tmp_path: Path) -> None:
    model = make_model()
    model.state["layers.0.p3"]["master"].view(-1)[0] = 70000.0
    save(tmp_path / "c", model, 2)
    with pytest.raises(ConsolidateError, match=r"cannot convert layers.0.p3: .* too large for float16"):
        consolidate(tmp_path / "c", tmp_path / "out", Options(dtype="fp16"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    consolidate(tmp_path / "c", tmp_path / "out", Options(dtype="bf16"))


def test_one_file(tmp_path: Path) -> None:
    model = make_model()
    save(tmp_path / "c", model, 2)
    consolidate(tmp_path / "c", tmp_path / "new" / "weights.safetensors")
    assert_equal(load_file(tmp_path / "new" / "weights.safetensors"), expected(model))
    consolidate(tmp_path / "c", tmp_path / "new" / "weights.bin", Options(dtype="bf16"))
    loaded = torch.load(tmp_path / "new" / "weights.bin", weights_only=True)
    assert loaded["head.weight"].data_ptr() == loaded["root.p0"].data_ptr(), "tied weights share memory"
    del loaded["head.weight"]
    assert_equal(loaded, expected(model, torch.bfloat16))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["weights.bin", "weights.safetensors"]


def test_only_trainable(tmp_path: Path) -> None:
    model = make_model()
    save(tmp_path / "c", model, 2)
    consolidate(tmp_path / "c", tmp_path / "out", Options(only_trainable=True))
    want = {name: tensor for name, tensor in expected(model).items() if not name.startswith("embedding")}
    assert len(want) < len(expected(model))
    assert_equal(read_folder(tmp_path / "out"), want)


def test_model_files_come_along(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(folder, make_model(), 2)
    files = ("tokenizer.json", "merges.txt", "spiece.model", "chat_template.jinja", "modeling_own.py")
    others = (
        "trainer_state.json",
        "model.safetensors.index.json",
        "optimizer.pt",
        "model.safetensors",
        "rng_state.pth",
    )
    for name in (*files, *others):
        (folder / name).write_text("{}")
    (folder / script.TEMPLATES).mkdir()
    (folder / script.TEMPLATES / "tool.jinja").write_text("x")
    vision = {"dtype": "bfloat16", "layers": 2}
    config = {"dtype": "bfloat16", "vision_config": vision, "quantization_config": {"dtype": "int8"}}
    (folder / "config.json").write_text(json.dumps(config))
    consolidate(folder, tmp_path / "out")
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == sorted([*files, "config.json", "model.safetensors", script.TEMPLATES])
    config["dtype"] = vision["dtype"] = "float64"  # the widest of what is written: nothing is rounded on loading
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_transformers_loads_the_masters(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    llama = LlamaForCausalLM(config)
    names = [name for name, _ in llama.named_parameters()]
    masters = {name: torch.randn(param.shape) for name, param in llama.named_parameters()}
    params = {name: master.to(torch.bfloat16) for name, master in masters.items()}
    state = {name: {"master": master} for name, master in masters.items()}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    model = WholeModel({"all": ("bfloat16", True, names)}, params, state, {}, {}, tied)
    save(tmp_path / "c", model, 3, 1000)
    config.save_pretrained(tmp_path / "c")
    consolidate(tmp_path / "c", tmp_path / "out", Options(shard_bytes=5000))
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_equal({name: param.detach() for name, param in loaded.named_parameters()}, masters)


# -------------------------------------------------------------------- stand-alone, small, whole or not at all
WITHOUT_PACKAGES = """
import runpy, sys
for name in ("torch", "hf_zero", "safetensors", "transformers", "tqdm"):
    sys.modules[name] = None  # importing it raises
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(folder: Path, *arguments: str, script: str = "consolidate.py") -> subprocess.CompletedProcess[str]:
    """Run the copy that lies in the folder, where only numpy can be imported."""
    command = [sys.executable, "-c", WITHOUT_PACKAGES, str(folder / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder.parent)


def test_the_copy_in_the_folder_stands_alone(tmp_path: Path) -> None:
    model = make_model()
    folder = tmp_path / "checkpoint-7"
    save(folder, model, 3, 16)
    assert (folder / "consolidate.py").read_text() == stand_alone.script()
    done = run_alone(folder, "checkpoint-7", "out", "--dtype", "bf16", "--shard-size", "1kB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "out" in done.stdout
    assert_equal(read_folder(tmp_path / "out"), expected(model, torch.bfloat16))
    for arguments, status, message in (
        (["checkpoint-7", "w.bin"], 1, "w.bin needs torch"),
        (["checkpoint-8"], 1, "checkpoint-8/zero/manifest.json is missing. There are checkpoints in "),
        ([".", "--tag", "checkpoint-7", "out"], 1, "out exists already"),
        (["checkpoint-7", "o", "--shard-size", "much"], 2, "'much' is not a size"),
    ):
        done = run_alone(folder, *arguments)
        assert done.returncode == status
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-7", "out"]


def read_header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    del header["__metadata__"]
    return header


def test_damage_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(folder, make_model(), 3)
    paths = [zero_folder(folder) / f"rank-{rank:05d}.safetensors" for rank in range(3)]
    content = paths[1].read_bytes()

    def refusal(options: Options = script.DEFAULTS) -> str:
        with pytest.raises(ConsolidateError) as caught:
            consolidate(folder, tmp_path / "out", options)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        return str(caught.value)

    paths[1].write_bytes(content[:-4] + b"abcd")
    last = max(read_header(paths[1]).items(), key=lambda item: item[1]["data_offsets"][1])[0]
    assert refusal() == f"{paths[1]} is damaged: wrong checksum, block 0 of {last} has changed"
    consolidate(folder, tmp_path / "out", Options(verify=False))
    shutil.rmtree(tmp_path / "out")
    paths[1].write_bytes(content[:8] + b"x" + content[9:])
    assert f"{paths[1]} is damaged" in refusal(Options(verify=False))
    paths[1].write_bytes(content[:-1])
    paths[2].unlink()
    assert (
        f"{paths[1]} is damaged: it has {len(content) - 1} bytes, not {len(content)}; {paths[2]} is missing"
        in refusal()
    )
    text = manifest_path(folder).read_text()
    manifest_path(folder).write_text(text.replace('"stage": 3', '"stage": 2'))
    assert "manifest.json is damaged: its checksum is wrong" in refusal()
    manifest_path(folder).write_text(text.replace('"format_version": 2', '"format_version": 5'))
    assert "has format version 5, this version reads up to 4" in refusal()
    manifest_path(folder).write_text(text[:-9])
    assert "manifest.json is damaged" in refusal()


def test_an_output_in_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(folder, make_model(), 1)
    (tmp_path / "empty").mkdir()
    consolidate(folder, tmp_path / "empty")
    (tmp_path / "x.safetensors").write_text("mine")
    for out in (tmp_path / "empty", tmp_path / "x.safetensors", folder, folder / "zero"):
        with pytest.raises(ConsolidateError, match="exists already"):
            consolidate(folder, out)
    assert (tmp_path / "x.safetensors").read_text() == "mine"
    with pytest.raises(ConsolidateError, match=f"cannot write {tmp_path}/x.safetensors/out: "):
        consolidate(folder, tmp_path / "x.safetensors" / "out")


def run_limited(setup: str, folder: Path, out: Path) -> dict[str, Any]:
    """Consolidate in a process of its own, in which `setup` ran first: the error, and the peak of anonymous memory."""
    code = f"""
        import json, resource, sys, threading, time
        from hf_zero.checkpoint.consolidate import ConsolidateError, consolidate
        def megabytes(field):
            lines = open("/proc/self/status").read().splitlines()
            return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024
        def watch():
            while True:
                samples.append(megabytes("RssAnon"))
                time.sleep(0.002)
        samples = []
        threading.Thread(target=watch, daemon=True).start()
        {setup}
        start = megabytes("RssAnon")
        samples.clear()
        try:
            consolidate({str(folder)!r}, {str(out)!r})
            error = None
        except ConsolidateError as problem:
            error = str(problem)
        print(json.dumps({{"mb": max(samples, default=start) - start, "samples": len(samples), "error": error}}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what is measured is not the disk."""
    if not os.access("/dev/shm", os.W_OK) or shutil.disk_usage("/dev/shm").free < 4e9:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(quick_folder: Path) -> None:
    """400 MB with one tensor of 240 MB: the promise is that tensor plus 200 MB, four threads need some 20."""
    names = {"big": (60_000_000,), "small": (40_000, 1000)}
    masters = {name: torch.rand(shape) for name, shape in names.items()}
    state = {name: {"master": master} for name, master in masters.items()}
    model = WholeModel({"all": ("float32", True, list(names))}, masters, state, {}, {})
    save(quick_folder / "c", model, 2, 10_000_000)
    # RLIMIT_DATA makes the bound hard: it also counts what is allocated and given back between two samples.
    limit = 'room = int(megabytes("VmData") + 64) << 20; resource.setrlimit(resource.RLIMIT_DATA, (room, room))'
    for setup, out, most in ((limit, "out", 48), ("import torch", "out.bin", 64)):
        result = run_limited(setup, quick_folder / "c", quick_folder / out)
        assert result["error"] is None
        assert result["samples"] > 20
        assert result["mb"] < most
    assert_equal(read_folder(quick_folder / "out"), masters)
    assert_equal(torch.load(quick_folder / "out.bin", weights_only=True, mmap=True), masters)


def test_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    save(folder, make_model(scale=100), 2)
    for out in (tmp_path / "out", tmp_path / "out.safetensors"):
        result = run_limited("resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))", folder, out)
        assert result["error"] == f"cannot write {out}: File too large"
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
