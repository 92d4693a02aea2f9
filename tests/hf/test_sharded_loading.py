"""from_pretrained in shards gives what a plain one gives, bit for bit, and reads this rank's slices only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.hf.models.from_pretrained import LoadReport, ShardedLoad
from tests.harness.ranks import run_ranks
from tests.hf.architectures import ARCHITECTURES, save_all


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and all buffers, those that are never saved too, under every name."""
    found = dict(model.named_parameters(remove_duplicate=False))
    return {name: value.detach().clone() for name, value in [*found.items(), *model.named_buffers()]}


def ties(model: nn.Module) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def load_both(root: Path, names: list[str], threshold: int) -> dict[str, Any]:
    read, reports = ShardedLoad.read, []

    def noted(load: ShardedLoad) -> LoadReport:
        reports.append(read(load))
        return reports[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedLoad, "read", noted)
        return _load_both(root, names, threshold, reports)


def _load_both(root: Path, names: list[str], threshold: int, reports: list[LoadReport]) -> dict[str, Any]:
    """Return for each architecture what differs between the two loads on this rank: nothing, one hopes."""
    rank = torch.distributed.get_rank()
    world = torch.distributed.get_world_size()
    outcome: dict[str, Any] = {}
    for name in names:
        one = ARCHITECTURES[name]
        torch.manual_seed(5)  # what rank 0 draws for new weights
        plain, plain_info = one.load_as.from_pretrained(root / name, output_loading_info=True, **one.options)
        zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
        hf_zero.enable({"zero_optimization": zero})
        torch.manual_seed(5 + rank)
        reports.clear()
        try:
            model, info = one.load_as.from_pretrained(root / name, output_loading_info=True, **one.options)
        finally:
            hf_zero.disable()
        differences = []
        engine = hf_zero.engine_of(model)
        assert engine is not None and engine.is_sharded == (threshold == 0)
        if info != plain_info:
            differences.append(f"loading info: {info} != {plain_info}")
        if ties(model) != ties(plain):
            differences.append(f"ties: {ties(model)} != {ties(plain)}")
        if threshold == 0 and not all(p.is_floating_point() and p.isnan().all() for p in model.parameters()):
            differences.append("something is whole")
        with hf_zero.gathered_params(model):
            loaded = everything(model)
        wanted = everything(plain)
        if list(loaded) != list(wanted):
            differences.append(f"names: {set(loaded) ^ set(wanted)}")
        for key in wanted:
            mine = loaded.get(key)
            if mine is None or mine.dtype != wanted[key].dtype or not torch.equal(mine, wanted[key]):
                differences.append(f"{key} differs")
        if model.training or any(not p.requires_grad for p in model.parameters()):
            differences.append("mode or requires_grad")
        [report] = reports
        outcome[name] = (differences, report.bytes_read, report.bytes_stored, world)
    return outcome


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_all(root)
    return root


@pytest.fixture(scope="module")
def loaded_on_2(saved: Path) -> list[dict[str, Any]]:
    return run_ranks(load_both, 2, saved, list(ARCHITECTURES), 0, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_a_plain_load_on_2_ranks(name: str, loaded_on_2: list[dict[str, Any]]) -> None:
    for outcome in loaded_on_2:
        assert outcome[name][0] == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.nightly)])
def test_equals_a_plain_load_on_3_ranks(every: int, saved: Path) -> None:
    for outcome in run_ranks(load_both, 3, saved, list(ARCHITECTURES)[::every], 0, timeout=300):
        assert {name: found[0] for name, found in outcome.items() if found[0]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama tied", "llama untied", "gpt2", "t5 tied", "bart", "clip", "vit", "whisper"])
def test_ranks_read_every_byte_once_together(name: str, loaded_on_2: list[dict[str, Any]]) -> None:
    shares = [outcome[name][1] for outcome in loaded_on_2]
    stored = loaded_on_2[0][name][2]
    assert sum(shares) <= 1.02 * stored  # buffers are read on every rank
    assert sum(shares) > 0.9 * stored or name in ("vit",)
    assert max(shares) < 0.62 * stored


def test_small_parameters_stay_whole(tmp_path: Path) -> None:
    save_all(tmp_path, ["llama tied", "bert with a new head"])
    for outcome in run_ranks(load_both, 2, tmp_path, ["llama tied", "bert with a new head"], 10**6):
        assert all(found[0] == [] for found in outcome.values())
