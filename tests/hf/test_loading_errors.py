"""Folders that cannot be loaded in shards: a named error on every rank, within seconds, and no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_zero
from hf_zero.engine.engine import engine_of
from tests.harness.ranks import run_ranks
from tests.harness.versions import is_older
from tests.hf.test_replaced_engine import ZERO, save


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut(folder: Path) -> None:
    path = files(folder)[1]
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_header(folder: Path) -> None:
    path = files(folder)[0]
    path.write_bytes(path.read_bytes()[:50])


def lengthen(folder: Path) -> None:
    path = files(folder)[0]
    path.write_bytes(path.read_bytes() + b"more")


def remove(folder: Path) -> None:
    files(folder)[1].unlink()


def empty_a_tensor_out(folder: Path) -> None:
    path = files(folder)[0]
    state = load_file(path)
    state.pop(sorted(state)[0])
    save_file(state, path, metadata={"format": "pt"})


def other_shape(folder: Path) -> None:
    path = files(folder)[0]
    state = {name: value[:-1].contiguous() for name, value in load_file(path).items()}
    save_file(state, path, metadata={"format": "pt"})


def unknown_type(folder: Path) -> None:
    path = files(folder)[0]
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"F32"', b'"X32"', 1))


def load(folder: Path, only_on: int | None = None, **options: Any) -> str:
    if only_on is not None and torch.distributed.get_rank() == only_on:
        cut(folder / "alone")
    torch.distributed.barrier()
    mine = folder / "alone" if torch.distributed.get_rank() == only_on else folder
    hf_zero.enable({"zero_optimization": ZERO})
    AutoModelForCausalLM.from_pretrained(mine, **options)
    return "loaded"


CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "cut": (cut, "CheckpointError", "was truncated or overwritten"),
    "cut in the header": (cut_in_header, "CheckpointError", "header was truncated"),
    "lengthened": (lengthen, "CheckpointError", "was truncated or overwritten"),
    "removed": (remove, "CheckpointError", "cannot be opened"),
    "absent tensor": (empty_a_tensor_out, "CheckpointError", "no file holds"),
    "other shapes": (other_shape, "RuntimeError", "mismatch"),
    "unknown type": (unknown_type, "CheckpointError", "X32"),
}


@pytest.mark.parametrize(
    "case", ["cut", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "cut")]
)
def test_damaged_folders(case: str, tmp_path: Path) -> None:
    damage, kind, words = CASES[case]
    damage(save(tmp_path))
    for failure in run_ranks(load, 2, tmp_path, timeout=30, expect_error=True):
        assert failure.kind == kind and words in failure.message, failure


def test_a_file_that_is_damaged_on_one_rank_only_is_an_error_on_all(tmp_path: Path) -> None:
    save(tmp_path)
    save(tmp_path / "alone")
    for failure in run_ranks(load, 2, tmp_path, only_on=1, timeout=30, expect_error=True):
        assert failure.kind == "CheckpointError" and "rank 1:" in failure.message, failure


def test_device_map_is_refused(tmp_path: Path) -> None:
    for failure in run_ranks(load, 2, save(tmp_path), device_map={"": "meta"}, timeout=30, expect_error=True):
        assert failure.kind == "ConfigError" and "device_map" in failure.message, failure


@pytest.mark.skipif(is_older("transformers", "5.23"), reason="transformers itself fails to load FP8 weights on a CPU")
def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    # A method that transformers itself undoes on the CPU, so that nothing needs to be installed.
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [4, 4],
    }
    path.write_text(json.dumps(config))
    for failure in run_ranks(load, 2, tmp_path, timeout=30, expect_error=True):
        assert "quantized" in failure.message, failure


def mismatched_head(folder: Path) -> None:
    hf_zero.enable({"zero_optimization": ZERO})
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).save_pretrained(folder / "two")
    AutoModelForSequenceClassification.from_pretrained(folder / "two", num_labels=5)


def test_every_mismatched_shape_is_listed(tmp_path: Path) -> None:
    for failure in run_ranks(mismatched_head, 2, save(tmp_path), timeout=60, expect_error=True):
        assert failure.kind == "RuntimeError" and "mismatch" in failure.message, failure


def alone(folder: Path) -> str:
    hf_zero.enable({"zero_optimization": ZERO})
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = hf_zero.engine_of(model)
    assert engine is not None
    if engine.rank == 0:
        with pytest.raises(hf_zero.StateError, match="save_pretrained"):
            model.save_pretrained(folder / "out")
        with pytest.raises(hf_zero.StateError, match="resize_token_embeddings"):
            model.resize_token_embeddings(101)
    dist.barrier()
    return "both raised" if engine.rank == 0 else ""


@pytest.mark.slow
def test_calls_on_one_rank_only_raise(tmp_path: Path) -> None:
    assert run_ranks(alone, 2, save(tmp_path), timeout=40, timeouts={"presence": 1})[0] == "both raised"
    assert not list((tmp_path / "out").glob("*.safetensors"))


def load_on_the_right_kind(folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Loads with a device_map that names the ranks' kind of device, as torch.set_default_device makes one."""
    import transformers.modeling_utils as modeling

    reserved: list[str] = []
    modeling.caching_allocator_warmup = lambda model, devices, quantizer: reserved.extend(map(str, devices.values()))
    hf_zero.enable({"zero_optimization": ZERO})
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    engine = engine_of(model)
    assert engine is not None and engine.is_sharded
    return reserved, engine.full_state_dict(keep=True)


def test_a_device_map_of_the_right_kind_reserves_nothing(tmp_path: Path) -> None:
    """transformers would reserve the bytes of the whole model on the GPU of every rank."""
    folder = save(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for reserved, got in run_ranks(load_on_the_right_kind, 2, folder, timeout=60):
        assert reserved == []
        assert got.keys() == want.keys() and all(torch.equal(got[name], value) for name, value in want.items())
