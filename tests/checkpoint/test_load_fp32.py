"""load_fp32_state_dict and load_fp32_into: the masters of a checkpoint, tensor by tensor, into any model."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.checkpoint.consolidate import consolidate
from hf_zero.checkpoint.format import zero_folder
from hf_zero.errors import CheckpointError
from tests.checkpoint.test_resume import Net, start, steps
from tests.harness.checkpoints import WholeModel, assert_same, make_model, save
from tests.harness.ranks import run_ranks


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def assert_all_same(got: Any, want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert_same(got[name], tensor)


# -------------------------------------------------------------------- the mapping
@pytest.mark.parametrize(("world_size", "bucket"), [(1, None), (2, 8), (3, None), (4, 8)])
def test_it_holds_the_consolidated_weights(tmp_path: Path, world_size: int, bucket: int | None) -> None:
    model = make_model(world_size)
    save(tmp_path / "c", model, world_size, bucket)
    consolidate(tmp_path / "c", tmp_path / "whole.safetensors")
    want = {name: widened(tensor) for name, tensor in load_file(tmp_path / "whole.safetensors").items()}
    want["head.weight"] = want["root.p0"]  # a safetensors file holds tied weights once
    state = hf_zero.load_fp32_state_dict(tmp_path / "c")
    assert_all_same(state, want)
    assert len(state) == len(want) == len(model.params) + len(model.buffers) + 1
    assert {name: state.shape(name) for name in state} == {name: tuple(t.shape) for name, t in want.items()}
    types = {dtype: sum(tensor.dtype == dtype for tensor in want.values()) for dtype in (torch.float32, torch.float64)}
    assert min(types.values()) > 5
    assert any(param.dtype == torch.bfloat16 for param in model.params.values()), "vacuous: nothing to widen"


def test_names_that_are_not_there(tmp_path: Path) -> None:
    save(tmp_path / "c", make_model(), 2)
    state = hf_zero.load_fp32_state_dict(tmp_path / "c")
    assert "nobody" not in state and state.get("nobody") is None
    for ask in (state.__getitem__, state.shape):
        with pytest.raises(KeyError, match="nobody"):
            ask("nobody")


def test_tied_names_give_one_tensor_that_is_not_kept(tmp_path: Path) -> None:
    save(tmp_path / "c", make_model(), 2)
    state = hf_zero.load_fp32_state_dict(tmp_path / "c")
    whole = dict(state)
    assert whole["head.weight"] is whole["root.p0"]
    whole["root.p0"].fill_(5.0)
    del whole
    gc.collect()
    assert not (state["head.weight"] == 5.0).any(), "read again: the mapping holds nothing itself"


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    model = make_model()
    model.tied["frozen.twin"] = "embedding.p0"
    save(tmp_path / "c", model, 2)
    every = hf_zero.load_fp32_state_dict(tmp_path / "c")
    trained = hf_zero.load_fp32_state_dict(tmp_path / "c", exclude_frozen_parameters=True)
    left_out = {name for name in every if name not in trained}
    assert left_out == {"frozen.twin", *(name for name in model.params if name.startswith("embedding."))}
    assert_all_same(trained, {name: every[name] for name in every if name not in left_out})


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    masters = {"small": torch.rand(1000), "big": torch.rand(1_000_000), "also": torch.rand(1000, 1000)}
    state = {name: {"master": master, "exp_avg": master} for name, master in masters.items()}
    model = WholeModel({"all": ("float32", True, list(masters))}, masters, state, {}, {})
    save(tmp_path / "c", model, 2)
    loaded = hf_zero.load_fp32_state_dict(tmp_path / "c")
    before = bytes_read()
    assert list(loaded) == list(masters) and len(loaded) == 3 and "big" in loaded
    assert loaded.shape("also") == (1000, 1000)
    assert bytes_read() - before < 4000, "names and shapes cost no reading"
    assert_same(loaded["small"], masters["small"])
    assert bytes_read() - before < 20_000
    assert_same(loaded["big"], masters["big"])
    assert 4_000_000 < bytes_read() - before < 4_100_000


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    masters = {"first": torch.rand(10), "between": torch.rand(30), "last": torch.rand(10)}
    state = {name: {"master": master} for name, master in masters.items()}
    model = WholeModel({"all": ("float32", True, list(masters))}, masters, state, {}, {})
    save(tmp_path / "c", model, 2)
    loaded = hf_zero.load_fp32_state_dict(tmp_path / "c")
    gone = zero_folder(tmp_path / "c") / "rank-00001.safetensors"
    gone.unlink()
    assert_same(loaded["first"], masters["first"])
    for name in ("between", "last"):
        with pytest.raises(CheckpointError, match=f"cannot read {gone}"):
            loaded[name]
    with pytest.raises(CheckpointError, match=f"{gone} is missing"):
        hf_zero.load_fp32_state_dict(tmp_path / "c")


def test_no_file_stays_open(tmp_path: Path) -> None:
    save(tmp_path / "c", make_model(), 3)

    def num_open() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{fd}").startswith(str(tmp_path)) for fd in os.listdir("/dev/fd"))

    with hf_zero.load_fp32_state_dict(tmp_path / "c") as state:
        assert len(dict(state)) == len(state) and num_open() in (3, 9)  # for direct reads too, where they work
    assert num_open() == 0
    assert state["root.p0"].numel() and num_open() > 0, "closed files are opened again"
    del state
    gc.collect()
    assert num_open() == 0


def test_tags_and_folders_without_a_checkpoint(tmp_path: Path) -> None:
    model = make_model()
    save(tmp_path / "run" / "best", model, 2)
    for given in ((tmp_path / "run", "best"), (tmp_path / "run" / "best",), (str(tmp_path / "run"), "best")):
        assert_same(hf_zero.load_fp32_state_dict(*given)["root.p0"], model.state["root.p0"]["master"])
    for load in (hf_zero.load_fp32_state_dict, lambda *given: hf_zero.load_fp32_into(nn.Linear(2, 2), *given)):
        with pytest.raises(CheckpointError, match=r"holds no complete checkpoint.*The newest .* is .*/run/best"):
            load(tmp_path / "run")
        with pytest.raises(CheckpointError, match="other holds no complete checkpoint"):
            load(tmp_path / "run", "other")


# -------------------------------------------------------------------- into a plain model
class Shared(nn.Module):
    """A tied weight, a module in two places (its buffers too), 16-bit and fp64 parameters, a buffer of integers."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.same = self.norm
        self.deep = nn.Linear(3, 2, dtype=torch.float64)
        self.head = nn.Linear(3, 7, bias=False, dtype=torch.bfloat16)
        if tied:
            self.head.weight = self.embed.weight


def save_shared(folder: Path) -> dict[str, torch.Tensor]:
    """Save masters that bfloat16 cannot hold; what the checkpoint has, without the further names."""
    plain = Shared()
    masters = {name: torch.randn(param.shape) for name, param in plain.named_parameters()}
    params = {name: masters[name].to(param.dtype) for name, param in plain.named_parameters()}
    state = {name: {"master": master} for name, master in masters.items()}
    buffers = {name: torch.full_like(buffer, 3) for name, buffer in plain.named_buffers()}
    tied = {"head.weight": "embed.weight", "same.weight": "norm.weight", "same.bias": "norm.bias"}
    units = {}
    for dtype in {str(param.dtype)[6:] for param in params.values()}:
        units[f"all/{dtype}"] = (dtype, True, [name for name in params if str(params[name].dtype)[6:] == dtype])
    assert len(units) == 3
    save(folder, WholeModel(units, params, state, {}, buffers, tied), 2, 8)
    return {**masters, **buffers}


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_model_takes_the_masters_in_its_own_types(tmp_path: Path, tied: bool) -> None:
    want = save_shared(tmp_path / "c" / "t")
    model = Shared(tied)
    pointers = {name: param.data_ptr() for name, param in model.named_parameters()}
    assert hf_zero.load_fp32_into(model, tmp_path / "c", "t") is model
    for name, tensor in model.state_dict().items():
        source = name.replace("head.", "embed.").replace("same.", "norm.")
        assert_same(tensor, want[source].to(tensor.dtype))
    assert pointers == {name: param.data_ptr() for name, param in model.named_parameters()}, "in place"
    assert model.norm.num_batches_tracked == 3
    assert all(param.requires_grad for param in model.parameters())
    assert not torch.equal(want["embed.weight"], want["embed.weight"].bfloat16().float())


def test_all_that_does_not_fit_is_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = save_shared(tmp_path / "c")
    model = Shared()
    model.extra = nn.Linear(1, 1)
    model.deep = nn.Linear(2, 3)
    del model.norm, model.same
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shapes = [
        "deep.weight: shape (3, 2) in the model, (2, 3) in the checkpoint",
        "deep.bias: shape (3,) in the model, (2,) in the checkpoint",
    ]
    names = [f"extra.{name}: not in the checkpoint" for name in ("weight", "bias")]
    names += [f"{name}: not in the model" for name in want if name.startswith("norm.")]
    names += [f"same.{name}: not in the model" for name in ("weight", "bias")]
    for strict, lines in ((True, [*shapes, *names]), (False, shapes)):
        with pytest.raises(CheckpointError) as caught:
            hf_zero.load_fp32_into(model, tmp_path / "c", strict=strict)
        first, *rest = str(caught.value).splitlines()
        assert first == f"{tmp_path / 'c'} does not fit the model ({len(lines)} differences):"
        assert sorted(line.strip() for line in rest) == sorted(lines)
    assert_all_same(model.state_dict(), before)

    del model.deep
    with caplog.at_level(logging.WARNING):
        hf_zero.load_fp32_into(model, tmp_path / "c", strict=False)
    assert "2 names of the model are not in it and stay as they are, 9 of its names are not" in caplog.text
    assert_same(model.head.weight.detach(), want["embed.weight"].bfloat16())
    assert_same(model.extra.weight.detach(), before["extra.weight"])


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    want = save_shared(tmp_path / "c")
    model = Shared().to("meta")
    with pytest.raises(CheckpointError, match=r"embed.weight: on the meta device.*to_empty"):
        hf_zero.load_fp32_into(model, tmp_path / "c")
    hf_zero.load_fp32_into(model.to_empty(device="cpu"), tmp_path / "c")
    assert_same(model.deep.weight.detach(), want["deep.weight"].double())


# -------------------------------------------------------------------- from and into a model that hf_zero manages
def train_and_save(folder: str) -> dict[str, torch.Tensor]:
    engine = start(3, seed=0, bf16=True)
    steps(engine, 0, 3)
    engine.save_checkpoint(folder, "last")
    return engine.full_state_dict(keep=engine.rank == 0)


def load_and_save(stage: int, source: str, target: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = start(stage, seed=99, bf16=True)
    steps(engine, 5, 6)
    assert hf_zero.load_fp32_into(engine.module, source, "last") is engine.module
    weights = engine.full_state_dict(keep=engine.rank == 0)
    engine.save_checkpoint(target)
    return weights, steps(engine, 6, 8)


@pytest.mark.slow
def test_masters_of_a_bf16_run_go_through_a_sharded_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    trained = run_ranks(train_and_save, 2, str(source))[0]
    masters = dict(hf_zero.load_fp32_state_dict(source, "last"))  # in this process there is no group
    assert masters.keys() == Net().state_dict().keys() == trained.keys()
    assert masters["head.weight"] is masters["embed.weight"]
    for name, tensor in masters.items():
        assert tensor.dtype == torch.float32
        assert_same(tensor.to(trained[name].dtype), trained[name])
    assert not torch.equal(masters["embed.weight"], trained["embed.weight"].float()), "vacuous: nothing was rounded"
    plain = hf_zero.load_fp32_into(Net(), source, "last")
    assert_all_same(plain.state_dict(), masters)
    for stage in (3, 1):
        target = tmp_path / f"target-{stage}"
        weights, losses = run_ranks(load_and_save, 2, stage, str(source), str(target))[0]
        assert_all_same(weights, trained)
        assert_all_same(hf_zero.load_fp32_state_dict(target), masters)
        assert losses[1] != losses[0] > 0


def load_while_gathered(stage: int, source: str) -> dict[str, torch.Tensor]:
    engine = start(stage, seed=99, bf16=True)
    steps(engine, 5, 6)
    with hf_zero.gathered_params(engine.module):
        before = engine.module.blocks[0].up.weight.detach().clone()
        hf_zero.load_fp32_into(engine.module, source, "last")
        shown = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
        assert not torch.equal(shown["blocks.0.up.weight"], before)
    told = pytest.raises(hf_zero.StateError, match="gathered for reading were written to")
    with told, hf_zero.gathered_params(engine.module), torch.no_grad():
        hf_zero.load_fp32_into(engine.module, source, "last")
        engine.module.blocks[0].up.weight.zero_()
    hf_zero.load_fp32_into(engine.module, source, "last")
    weights = engine.full_state_dict(keep=True)
    assert_all_same(shown, weights)
    steps(engine, 6, 7)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_load_inside_gathered_params_shows_the_new_weights(tmp_path: Path, stage: int) -> None:
    trained = run_ranks(train_and_save, 2, str(tmp_path))[0]
    for weights in run_ranks(load_while_gathered, 2, stage, str(tmp_path)):
        assert_all_same(weights, trained)


def load_what_does_not_fit(folder: str) -> list[str]:
    engine = start(3, seed=1)
    before = engine.full_state_dict(keep=True)
    texts = []
    for tag, strict in (("other", True), ("nowhere" if engine.rank == 1 else "other", False)):
        try:
            hf_zero.load_fp32_into(engine.module, folder, tag, strict)
        except CheckpointError as error:
            texts.append(str(error))
    assert_all_same(engine.full_state_dict(keep=True), before)
    hf_zero.load_fp32_into(engine.module, folder, "other", strict=False)
    after = engine.full_state_dict(keep=True)
    assert after["calls"].tolist() == [8.0] and after["blocks.1.frozen"].tolist() == [2.0] * 13
    assert_all_same({**after, "calls": before["calls"], "blocks.1.frozen": before["blocks.1.frozen"]}, before)
    return texts


def test_every_rank_hears_what_does_not_fit(tmp_path: Path) -> None:
    params = {"blocks.1.frozen": torch.full((13,), 2.0), "nobody": torch.rand(3)}
    state = {name: {"param": param} for name, param in params.items()}
    units = {"all": ("float32", False, list(params))}
    save(tmp_path / "other", WholeModel(units, params, state, {}, {"calls": torch.full((1,), 8.0)}), 3)
    for texts in run_ranks(load_what_does_not_fit, 2, str(tmp_path)):
        assert len(texts) == 2
        assert "blocks.0.up.weight: not in the checkpoint" in texts[0] and "nobody: not in the model" in texts[0]
        assert texts[1].startswith(f"rank 1: {tmp_path}/nowhere holds no complete checkpoint")


def load_on_one_rank(folder: str) -> str | None:
    engine = start(3, seed=1)
    if engine.rank == 1:
        return None
    with pytest.raises(hf_zero.StateError) as caught:
        hf_zero.load_fp32_into(engine.module, folder)
    return str(caught.value)


def test_one_rank_alone_is_told_so(tmp_path: Path) -> None:
    text = run_ranks(load_on_one_rank, 2, str(tmp_path), timeouts={"presence": 1})[0]
    assert "rank 0 called load_fp32_into, but rank(s) [1] did not" in text
