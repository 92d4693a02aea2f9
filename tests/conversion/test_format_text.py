"""conversion/README.md is enough to read a checkpoint: here one is read by it, without hf_zero's readers or torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

TYPES = {"float32": ("F32", "<f4"), "int64": ("I64", "<i8")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Linear(5, 13)
        self.down = nn.Linear(13, 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("calls", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.frozen


def save(folder: str, stage: int) -> dict[str, Any]:
    """Train and save; returns weights and moments under the keys of the files, which a plain torch.optim gives."""
    zero = {"stage": stage, "reduce_bucket_size": 40, "allgather_bucket_size": 40}
    config = {
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "train_micro_batch_size_per_gpu": 2,
    }
    engine = hf_zero.initialize(model=Net(), config=config)[0]
    model = Net()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        inputs = torch.linspace(-1, 1, 10).view(2, 5)
        engine.backward(engine(inputs).square().mean())
        engine.step()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    engine.save_checkpoint(folder, "here")
    wanted = {}
    for name, param in model.named_parameters():
        wanted[f"{name}::{'master' if param.requires_grad else 'param'}"] = param.detach().numpy()
        for kind in ("exp_avg", "exp_avg_sq") if param.requires_grad else ():
            wanted[f"{name}::{kind}"] = optimizer.state[param][kind].numpy()
    return wanted


# -------------------------------------------------------------------- the reader, by the text
def read_file(path: Path, info: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The header, and the data, of which every block has the right checksum."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert (len(content), zlib.crc32(content[: 8 + length])) == (info["size"], info["crc32"])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    checksums = iter(header["__metadata__"]["crc32"][at : at + 8] for at in itertools.count(step=8))
    end = 0
    for key, entry in header.items():
        if key != "__metadata__":
            start, end = end, entry["data_offsets"][1]
            assert entry["data_offsets"][0] == start
            for block in range(start, end, 1 << 20):
                assert next(checksums) == f"{zlib.crc32(data[block : min(block + (1 << 20), end)]):08x}"
    assert (end, next(checksums)) == (len(data), "")
    return header, data


def stored(header: dict[str, Any], data: bytes, key: str, dtype: str) -> Any:
    code, code_of_numpy = TYPES[dtype]
    assert header[key]["dtype"] == code
    begin, end = header[key]["data_offsets"]
    array = np.frombuffer(data[begin:end], code_of_numpy)
    assert header[key]["shape"] == [array.size]
    return array


def joined(layout: dict[str, Any], slot: list[Any], kind: str, dtype: str, files: list[Any]) -> Any:
    name, shape, offset = slot
    position, end, bucket = offset, offset + math.prod(shape), layout["bucket_numel"]
    used = [0] * layout["world_size"]
    parts = []
    while position < end:
        start = position - position % bucket
        part = min(bucket, layout["padded_numel"] - start) // layout["world_size"]
        rank = (position - start) // part
        count = min(start + (rank + 1) * part, end) - position
        file = files[layout.get("first_rank", 0) + rank]
        parts.append(stored(file[0], file[1], f"{name}::{kind}", dtype)[used[rank] : used[rank] + count])
        used[rank] += count
        position += count
    return np.concatenate(parts).reshape(shape)


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("ascii")).hexdigest()


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    manifest = json.loads((folder / "zero" / "manifest.json").read_text("ascii"))
    crc32 = manifest.pop("crc32")
    assert crc32 == zlib.crc32(json.dumps(manifest, sort_keys=True).encode("ascii"))
    files = [read_file(folder / "zero" / info["name"], info) for info in manifest["files"]]
    marks = files[0][0]["__metadata__"]
    assert marks["layout"] == digest({key: manifest[key] for key in ("layouts", "params", "tied")})
    assert marks["buffers"] == digest(manifest["buffers"])
    found = {}
    for layout in manifest["layouts"]:
        for slot in layout["slots"]:
            for kind, dtype in manifest["kinds"][slot[0]].items():
                found[f"{slot[0]}::{kind}"] = joined(layout, slot, kind, dtype, files)
    for info in manifest["buffers"]:
        key = f"{info['name']}::buffer"
        found[key] = stored(*files[0], key, info["dtype"]).reshape(info["shape"])
    return manifest, found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_is_read_by_the_text_alone(stage: int, tmp_path: Path) -> None:
    wanted = run_ranks(save, 2, str(tmp_path), stage)[0]
    manifest, found = read_checkpoint(tmp_path / "here")
    assert found.pop("calls::buffer").tolist() == [0, 1, 2]
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-8, err_msg=key)
    assert manifest["scalars"]["up.weight"]["step"] == 3
    assert any(layout["padded_numel"] > layout["bucket_numel"] for layout in manifest["layouts"])


def save_pipeline(folder: str) -> dict[str, Any]:
    """Two stages; returns the weights of both."""
    torch.manual_seed(2)
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 2)]
    wanted = {f"{n}.{name}": p.detach().numpy() for n, one in enumerate(layers) for name, p in one.named_parameters()}
    module = hf_zero.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        "train_micro_batch_size_per_gpu": 2,
        "pipeline": {"stages": 2},
    }
    engine = hf_zero.initialize(model=module, config=config)[0]
    engine.train_batch(iter([(torch.ones(2, 5), torch.ones(2, 2))]))
    engine.save_checkpoint(folder, "here")
    return wanted


def test_a_pipeline_is_read_by_the_text_alone(tmp_path: Path) -> None:
    wanted = run_ranks(save_pipeline, 2, str(tmp_path))[0]
    manifest, found = read_checkpoint(tmp_path / "here")
    assert manifest["format_version"] == 3 and {one.get("first_rank", 0) for one in manifest["layouts"]} == {0, 1}
    assert {layout["world_size"] for layout in manifest["layouts"]} == {1} and manifest["world_size"] == 2
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[f"{name}::master"], value)
    text = (Path(__file__).resolve().parents[2] / "conversion" / "README.md").read_text("ascii")
    assert [name for layout in manifest["layouts"] for name in layout if f"`{name}`" not in text] == []


def test_the_text_names_every_field(tmp_path: Path) -> None:
    run_ranks(save, 1, str(tmp_path), 2)
    text = (Path(__file__).resolve().parents[2] / "conversion" / "README.md").read_text("ascii")
    manifest = json.loads((tmp_path / "here" / "zero" / "manifest.json").read_text("ascii"))
    fields = [*manifest, *manifest["extra"], *manifest["layouts"][0], *manifest["files"][0], *manifest["params"][0]]
    assert [name for name in fields if f"`{name}`" not in text] == []
