"""A run of FSDP2 goes on in hf_zero, and the other way; what is no such checkpoint is said, and nothing is written."""

from __future__ import annotations

import math
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_zero
from hf_zero.checkpoint.folders import read_manifest
from hf_zero.conversion.dcp import from_dcp, to_dcp
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.main import main
from tests.harness.ranks import run_ranks

BEFORE, AFTER = 3, 5
RATES = {"lr": 0.01, "weight_decay": 0.1}


class Net(nn.Module):
    """Sizes that two ranks do not divide, buffers, and a frozen parameter."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.tensor([2.0]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.eval()
        return self.down(torch.tanh(self.norm(self.up(x)))) * self.scale


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows on every rank, so that the loss does not depend on how many there are."""
    made = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, generator=made), torch.randn(4, 3, generator=made)


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], **RATES)


def fsdp_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        inputs, wanted = batch(step)
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp_saves(folder: str, flatten: bool) -> list[float]:
    model, optimizer = sharded()
    fsdp_steps(model, optimizer, 0, BEFORE)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    return fsdp_steps(model, optimizer, BEFORE, BEFORE + AFTER)


def fsdp_resumes(folder: str, kind: str) -> list[float]:
    model, _ = sharded()
    optimizer = getattr(torch.optim, kind)([one for one in model.parameters() if one.requires_grad], **RATES)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    both = {"model": weights, "optim": state}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    return fsdp_steps(model, optimizer, BEFORE, BEFORE + AFTER)


def engine_of(stage: int, width: int = 7, offload: bool = False, kind: str = "AdamW") -> Any:
    block = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    config = {
        "zero_optimization": {"stage": stage, **block},
        "optimizer": {"type": kind, "params": RATES | ({"adam_w_mode": False} if kind == "Adam" else {})},
        "train_micro_batch_size_per_gpu": 4,
    }
    return hf_zero.initialize(model=Net(width), config=config)[0]


def engine_steps(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        inputs, wanted = batch(step)
        loss = nn.functional.mse_loss(engine(inputs), wanted)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def engine_resumes(folder: str, stage: int) -> list[float]:
    engine = engine_of(stage)
    head, tag = os.path.split(folder)
    engine.load_checkpoint(head, tag)
    assert engine.global_steps == BEFORE
    return engine_steps(engine, BEFORE, BEFORE + AFTER)


def engine_saves(folder: str, stage: int, offload: bool, kind: str) -> list[float]:
    engine = engine_of(stage, offload=offload, kind=kind)
    engine_steps(engine, 0, BEFORE)
    head, tag = os.path.split(folder)
    engine.save_checkpoint(head, tag)
    return engine_steps(engine, BEFORE, BEFORE + AFTER)


@pytest.mark.parametrize("flatten", [True, False])
def test_fsdp2_goes_on_in_hf_zero(flatten: bool, tmp_path: Path) -> None:
    wanted = run_ranks(fsdp_saves, 2, str(tmp_path / "fsdp"), flatten)[0]
    from_dcp(tmp_path / "fsdp", tmp_path / "zero")
    for ranks, stage in ((1, 2), (2, 3)):
        losses = run_ranks(engine_resumes, ranks, str(tmp_path / "zero"), stage)[0]
        assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "stage", "offload", "kind"),
    [(1, 2, False, "AdamW"), (2, 3, False, "Adam"), (2, 2, True, "AdamW"), (1, 3, True, "Adam")],
)
def test_hf_zero_goes_on_in_fsdp2(ranks: int, stage: int, offload: bool, kind: str, tmp_path: Path) -> None:
    wanted = run_ranks(engine_saves, ranks, str(tmp_path / "zero"), stage, offload, kind)[0]
    to_dcp(tmp_path / "zero", tmp_path / "fsdp")
    losses = run_ranks(fsdp_resumes, 2, str(tmp_path / "fsdp"), kind)[0]
    assert losses == pytest.approx(wanted, rel=1e-5)


def saves_under_names(folder: str, where: str) -> list[float]:
    """Save as scripts and tools do that do not say "optim"."""
    model, optimizer = sharded()
    fsdp_steps(model, optimizer, 0, BEFORE)
    if where == "accelerate":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        save_fsdp_model(plugin, Accelerator(cpu=True), model, folder)
        save_fsdp_optimizer(plugin, Accelerator(cpu=True), optimizer, model, folder)
    else:
        weights, state = get_state_dict(model, optimizer)
        both = {"model": weights, "optimizer": state} if where == "optimizer" else {"model": weights, "optim": state}
        app = {"app": both, "scheduler": {"last_epoch": 3}}
        dcp.save(both if where == "optimizer" else app, checkpoint_id=folder)
    return fsdp_steps(model, optimizer, BEFORE, BEFORE + AFTER)


@pytest.mark.parametrize("where", ["optimizer", "app", "accelerate"])
def test_the_optimizer_is_found_under_any_name(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = run_ranks(saves_under_names, 2, str(tmp_path / "fsdp"), where)[0]
    from_dcp(tmp_path / "fsdp", tmp_path / "zero")
    losses = run_ranks(engine_resumes, 2, str(tmp_path / "zero"), 3)[0]
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert ("left out: scheduler.last_epoch" in caplog.text) == (where == "app")


def test_half_of_a_checkpoint_of_accelerate_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "fsdp"
    run_ranks(saves_under_names, 2, str(source), "accelerate")
    from_dcp(source / "pytorch_model_fsdp_0", tmp_path / "half")
    assert f"without its optimizer, which {source} has" in caplog.text
    refused(source / "optimizer_0", "holds nothing under 'model', but optimizer")
    shutil.rmtree(source / "optimizer_0")
    from_dcp(source, tmp_path / "weights")
    assert f"{source} has no optimizer_0" in caplog.text


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    model = Net()
    group = {"param_groups": {"0": {"params": ["a"], "lr": torch.tensor(0.1)}}}
    state = {"model": model.state_dict(), "first": group, "second": group}
    dcp.save(state, checkpoint_id=tmp_path / "two", no_dist=True)
    refused(tmp_path / "two", "several optimizers: first, second")


# -------------------------------------------------------------------- bad input
@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = Net()
    folder = tmp_path / "plain"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    return folder


def refused(source: Path, *said: str) -> None:
    target = source.parent / "out"
    with pytest.raises(CheckpointError) as error:
        from_dcp(source, target)
    assert all(text in str(error.value) for text in said), error.value
    assert not list(source.parent.glob("out*"))


def test_a_foreign_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    refused(tmp_path / "foreign", ".metadata is missing")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        to_dcp(tmp_path / "foreign", tmp_path / "out")


def test_missing_and_torn_files_are_named(saved: Path) -> None:
    file = next(saved.glob("*.distcp"))
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    refused(saved, str(file), "torn")
    file.unlink()
    refused(saved, str(file), "missing")


def test_code_in_the_metadata_does_not_run(saved: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(saved / "ran"),)

    (saved / ".metadata").write_bytes(pickle.dumps(Evil()))
    refused(saved, str(saved / ".metadata"), "mkdir", "save it with torch's own writer")
    assert not (saved / "ran").exists()


def test_a_target_that_exists_stays(saved: Path) -> None:
    target = saved.parent / "out"
    target.mkdir()
    (target / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match="exists"):
        from_dcp(saved, target)
    from_dcp(saved, saved.parent / "zero", buffers=["scale"])
    with pytest.raises(CheckpointError, match="exists"):
        to_dcp(saved.parent / "zero", target)
    assert [path.name for path in target.iterdir()] == ["mine"]


def optimizer_of(folder: Path, optimizer: type[torch.optim.Optimizer]) -> Any:
    """Return what the converted manifest says of a run with this optimizer."""
    model = Net()
    run = optimizer([one for one in model.parameters() if one.requires_grad], lr=0.1)  # type: ignore[call-arg]
    model(batch(0)[0]).sum().backward()
    run.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, run, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder / "plain", no_dist=True)
    from_dcp(folder / "plain", folder / "out")
    return read_manifest(folder / "out").optimizer


def test_an_optimizer_with_the_state_of_another_is_refused(tmp_path: Path) -> None:
    assert optimizer_of(tmp_path / "sgd", torch.optim.SGD) == "SGD"
    with pytest.raises(CheckpointError, match="not that of Adam, AdamW or SGD of torch"):
        optimizer_of(tmp_path / "radam", torch.optim.RAdam)


def test_flipped_bits_of_the_metadata(tmp_path: Path) -> None:
    """A pickle has no checksums: what cannot be from DCP is named, and nothing ends in an error from the inside."""
    run_ranks(fsdp_saves, 1, str(tmp_path / "plain"), True)
    path = tmp_path / "plain" / ".metadata"
    whole, chance = path.read_bytes(), random.Random(3)
    from_dcp(tmp_path / "plain", tmp_path / "whole")
    wanted = read_manifest(tmp_path / "whole")
    refusals = 0
    for position in chance.sample(range(len(whole)), 250):
        data = bytearray(whole)
        data[position] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        try:
            from_dcp(tmp_path / "plain", tmp_path / "out")
        except CheckpointError:
            refusals += 1
            assert not (tmp_path / "out").exists()
        else:
            found = read_manifest(tmp_path / "out")
            assert [{*group} for group in found.param_groups][:1] * len(found.param_groups) == [
                {*group} for group in found.param_groups
            ], position
            assert len(found.params) == len(wanted.params), position
    assert refusals > 100


@pytest.mark.parametrize("nested", [False, True])
def test_a_group_that_lacks_what_others_have_is_refused(nested: bool, tmp_path: Path) -> None:
    model = Net()
    trained = [one for one in model.parameters() if one.requires_grad]
    run = torch.optim.AdamW([{"params": trained[:1], "lr": 0.1}, {"params": trained[1:], "note": "mine"}], lr=0.2)
    model(batch(0)[0]).sum().backward()
    run.step()
    options = StateDictOptions(flatten_optimizer_state_dict=not nested)
    weights, state = get_state_dict(model, run, options=options)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "whole", no_dist=True)
    if not nested:  # what a user has added to one group is no hyperparameter, and the nested form would keep it
        from_dcp(tmp_path / "whole", tmp_path / "fine")
        assert len(read_manifest(tmp_path / "fine").param_groups) == 2
    name = next(key for key in state if key.startswith("param_groups.") and key.endswith(".eps")) if not nested else ""
    if nested:
        del state["param_groups"][1]["eps"]
    else:
        del state[name]
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
    refused(tmp_path / "plain", "lacks eps, which other groups of its optimizer have")


@pytest.mark.parametrize(
    ("optim", "said"),
    [
        ({"state.w.step": torch.tensor(math.nan), "param_groups.w.lr": 0.1, "param_groups.w.amsgrad": 0.0}, "a count"),
        ({"param_groups.x.params": ["w"], "param_groups.0.params": ["w"]}, "no parameter group with a number"),
        ({"param_groups.0.params": ["v"]}, "names no parameters under 'model'"),
    ],
)
def test_steps_and_groups_that_are_none(optim: dict[str, Any], said: str, tmp_path: Path) -> None:
    moments = {f"state.w.{kind}": torch.ones(2) for kind in ("exp_avg", "exp_avg_sq") if "state.w.step" in optim}
    state = {"model": {"w": torch.ones(2)}, "optim": {**optim, **moments}}
    dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    refused(tmp_path / "plain", said)


def loads_another_model(folder: str) -> str:
    engine = engine_of(2, width=8)
    try:
        engine.load_checkpoint(*os.path.split(folder))
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_names_of_another_model_are_listed(saved: Path) -> None:
    from_dcp(saved, saved.parent / "zero")
    said = run_ranks(loads_another_model, 1, str(saved.parent / "zero"))[0]
    assert all(name in said for name in ("up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight"))


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There and back again, with every value."""
    run_ranks(fsdp_saves, 1, str(tmp_path / "fsdp"), True)
    assert main(["convert", "from-dcp", str(tmp_path / "fsdp"), str(tmp_path / "ours")]) == 0
    assert main(["convert", "to-dcp", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert main(["convert", "from-dcp", str(tmp_path / "back"), str(tmp_path / "again")]) == 0
    first, second = ((tmp_path / name / "zero" / "rank-00000.safetensors").read_bytes() for name in ("ours", "again"))
    assert first == second
    assert f"{tmp_path / 'fsdp'} -> {tmp_path / 'ours'}" in capsys.readouterr().out
    assert main(["convert", "to-dcp", str(tmp_path / "ours"), str(tmp_path / "back")]) == 1
    assert "exists" in capsys.readouterr().err
