"""Bytes of rank files: how they are written, and that a change of any bit is found by whoever reads it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_zero.checkpoint import rank_writer
from hf_zero.checkpoint.consolidate import consolidate
from hf_zero.checkpoint.direct_reads import ReadAhead
from hf_zero.checkpoint.folders import read_manifest
from hf_zero.checkpoint.format import BLOCK_BYTES, ConsolidateError, FileInfo, SaveInfo, TensorInfo, zero_folder
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.checkpoint.writer import Chunked, SliceState, build_manifest, commit, prepare_folder, write_rank_file
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.main import main
from hf_zero.layout import Piece, UnitLayout
from tests.checkpoint.test_manifest_edits import VERSION_1, read_all
from tests.harness.checkpoints import assert_holds, assert_same, make_model, save
from tests.harness.in_memory import SHARED_MEMORY

NUMEL = 5 * BLOCK_BYTES // 4 + 1000  # a little more than five blocks of floats


def large(folder: Path, world_size: int, bucket: int | None) -> torch.Tensor:
    """Save one parameter of several blocks in every file; returns it."""
    values = torch.arange(NUMEL * world_size, dtype=torch.float32)
    layout = UnitLayout.build(
        "u", {"w": values.shape}, dtype="float32", trainable=True, world_size=world_size, max_bucket_numel=bucket
    )
    info = SaveInfo(
        world_size=world_size, stage=2, layouts=(layout,), params=(TensorInfo("w", tuple(values.shape), "float32"),)
    )
    prepare_folder(folder)
    records = []
    for rank in range(world_size):
        [run] = layout.slices(rank)
        mine = torch.cat([values[piece.start : piece.end] for piece in run.pieces])
        records.append(write_rank_file(folder, rank, [SliceState(run, {"master": mine})], info=info))
    commit(folder, build_manifest(info, records), {})
    return values


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def part(start: int, numel: int) -> list[Piece]:
    return [Piece("w", start, numel, 0, 0)]


def forget_cached(folder: Path) -> None:
    """Have the page cache give up the rank files."""
    for path in zero_folder(folder).glob("rank-*"):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_load_reads_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts begin and end inside blocks, are large enough for threads, and are the same through the page cache."""
    assert not tmp_path.is_relative_to(SHARED_MEMORY), "conftest.py: files in memory are not read past the page cache"
    values = large(tmp_path, 3, 120_000)
    file_system = subprocess.check_output(["stat", "-f", "-c", "%T", tmp_path]).strip()
    fills, fill = [], ReadAhead.fill
    monkeypatch.setattr(ReadAhead, "fill", lambda *arguments: fills.append(fill(*arguments)) or fills[-1])
    forget_cached(tmp_path)

    def read() -> None:
        with open_checkpoint(tmp_path) as reader:
            for start, numel in ((0, values.numel()), (7, 1000), (NUMEL - 5, BLOCK_BYTES)):
                assert_same(reader.read("w", "master", part(start, numel)), values[start : start + numel])

    read()
    assert any(fills) or file_system == b"tmpfs", "nothing was read past the page cache"
    fills.clear()
    with monkeypatch.context() as patch:
        patch.delattr(os, "O_DIRECT", raising=False)
        read()
    assert not fills


# -------------------------------------------------------------------- checksums
@pytest.mark.parametrize("version", [1, 2])
def test_a_flipped_bit_is_found_wherever_it_is(version: int, tmp_path: Path) -> None:
    model, folder = make_model(3), tmp_path / "c"
    if version == 1:
        shutil.copytree(VERSION_1, folder)
    else:
        save(folder, model, 2, 64)
    assert read_manifest(folder).format_version == version
    path = zero_folder(folder) / "rank-00000.safetensors"
    size, rng = path.stat().st_size, random.Random(0)
    bits = [0, 63, 64, 8 * size - 1, *(rng.randrange(8 * size) for _ in range(150))]
    for bit in bits:
        flip(path, bit)
        with open_checkpoint(folder) as reader, pytest.raises(CheckpointError, match=f"{path} is damaged"):
            reader.verify()
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            read_all_parts(folder)  # no other byte is needed to see it
        flip(path, bit)
    read_all(folder, model)


def read_all_parts(folder: Path) -> None:
    """Read all parts, as a load does."""
    with open_checkpoint(folder) as reader:
        reader.verify_before_reading()
        for info in reader.manifest.params:
            for kind in reader.kinds(info.name):
                shape = reader.shape(info.name)
                reader.read(info.name, kind, [Piece(info.name, 0, torch.Size(shape).numel(), 0, 0)])
        for info in reader.manifest.buffers:
            reader.read_buffer(info.name)


@pytest.mark.parametrize(("world_size", "bucket"), [(1, None), (2, 100_000)])
def test_a_read_checks_its_own_blocks(world_size: int, bucket: int | None, tmp_path: Path) -> None:
    """And reads no block twice, wherever the parts that it is made of begin."""
    values = large(tmp_path, world_size, bucket)
    path = zero_folder(tmp_path) / "rank-00000.safetensors"
    with open_checkpoint(tmp_path) as reader, counted_reads() as count:
        assert torch.equal(reader.read("w", "master", part(0, len(values))), values)
        assert count[0] <= sum(file.size for file in reader.manifest.files)
        for start, numel in ((0, 10), (BLOCK_BYTES // 4 - 5, 10), (300_000, 700_001), (len(values) - 3, 3)):
            assert torch.equal(reader.read("w", "master", part(start, numel)), values[start : start + numel])
        flip(path, 8 * (path.stat().st_size - 4 * NUMEL + BLOCK_BYTES + 77))  # in the second block
        first = BLOCK_BYTES // 4 - 1 if world_size == 1 else 100_000
        assert torch.equal(reader.read("w", "master", part(0, first)), values[:first])
        with pytest.raises(CheckpointError, match=f"{path} is damaged: wrong checksum, block 1 of w::master"):
            reader.read("w", "master", part(500_000, 90_000))
    with pytest.raises(ConsolidateError, match="block 1 of w::master"):
        consolidate(tmp_path, tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("out*"))


class counted_reads:
    """Bytes that are read inside."""

    def __enter__(self) -> list[int]:
        count, self._preadv = [0], os.preadv

        def preadv(descriptor: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
            found = self._preadv(descriptor, views, offset, flags)
            count[0] += found
            return found

        os.preadv = preadv  # type: ignore[assignment]
        return count

    def __exit__(self, *error: object) -> None:
        os.preadv = self._preadv


# -------------------------------------------------------------------- version 1
def test_a_checkpoint_of_version_1_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = tmp_path / "c", make_model(3)
    shutil.copytree(VERSION_1, folder)
    read_all(folder, model)
    assert main(["inspect", str(folder), "--verify"]) == 0
    consolidate(folder, tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    for name, param in model.params.items():
        if param.numel():
            assert_same(found[name], model.state[name].get("master", param))
    save(folder, make_model(4), 3)
    assert_holds(folder, make_model(4))
    assert read_manifest(folder).format_version == 2


# -------------------------------------------------------------------- writing
def write(folder: Path, rank: int = 0) -> FileInfo:
    """Write tensors of many types, in memory and in chunks, in one piece and strided."""
    generator = torch.Generator().manual_seed(rank)
    kinds: dict[str, Any] = {}
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool)):
        values = torch.randint(0, 2, (2 * NUMEL // 9,), generator=generator).to(dtype)
        kinds[f"whole{number}"], kinds[f"strided{number}"] = values[::2].contiguous(), values[::2]
        kinds[f"chunks{number}"] = Chunked(len(values[::2]), dtype, lambda values=values: parts(values[::2]))
    [run] = UnitLayout.build("u", {"w": (len(values[::2]),)}, dtype="float32", trainable=True, world_size=1).slices(0)
    (zero_folder(folder)).mkdir(parents=True, exist_ok=True)
    buffers = {"step": torch.tensor(3), "empty": torch.empty(0, 4), "mask": torch.ones(3, dtype=torch.bool)}
    return write_rank_file(folder, rank, [SliceState(run, kinds)], buffers).file


def parts(values: torch.Tensor) -> Iterator[torch.Tensor]:
    memory = torch.empty(10_007, dtype=values.dtype)  # used again: a chunk is valid until the next one
    for chunk in values.split(10_007):
        yield memory[: len(chunk)].copy_(chunk)


def test_both_ways_of_writing_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = write(tmp_path / "native")
    content = (tmp_path / "native" / "zero" / native.name).read_bytes()
    loaded = load_file(tmp_path / "native" / "zero" / native.name)
    for number in range(5):
        for how in ("strided", "chunks"):
            assert torch.equal(loaded[f"w::{how}{number}"], loaded[f"w::whole{number}"])
    monkeypatch.setattr(rank_writer, "STAGE_BYTES", 3 * 4096)  # many turns, which end in the middle of tensors
    write(tmp_path / "small")
    monkeypatch.setattr(rank_writer, "_has_library", lambda: False)
    write(tmp_path / "plain")
    for other in ("small", "plain"):
        assert (tmp_path / other / "zero" / native.name).read_bytes() == content, other


def test_threads_write_files_side_by_side(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda rank: write(tmp_path / "together", rank), range(4)))
    for rank, info in enumerate(found):
        assert info == write(tmp_path / "alone", rank)
        both = [(tmp_path / folder / "zero" / info.name).read_bytes() for folder in ("together", "alone")]
        assert both[0] == both[1]


def test_a_file_that_does_not_fit_is_refused_before_the_disk_is_full(tmp_path: Path) -> None:
    numel = shutil.disk_usage(tmp_path).total
    [run] = UnitLayout.build("u", {"w": (numel,)}, dtype="float32", trainable=True, world_size=1).slices(0)
    never = Chunked(numel, torch.uint8, lambda: pytest.fail("it was written"))
    prepare_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot write .*rank-00000.safetensors: No space left .* for its \d+ "):
        write_rank_file(tmp_path, 0, [SliceState(run, {"master": never})])
    assert not list(zero_folder(tmp_path).iterdir())
