"""The places where checkpoints go and come from: tags, `latest`, and ranks that do not agree or fail alone."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero import CheckpointError
from hf_zero.checkpoint.direct_reads import DirectFile
from hf_zero.checkpoint.optimizer_state import read_states
from hf_zero.checkpoint.reader import CheckpointReader, open_checkpoint
from hf_zero.engine.engine import ZeroEngine
from tests.checkpoint.test_resume import Net, start, steps
from tests.harness.ranks import run_ranks

SOON_S = 8.0  # of a desync_timeout of 600


def weights(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    return engine.full_state_dict(keep=True)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def listing(folder: str | Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def refused(call: Callable[[], Any], match: str) -> str:
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=match) as caught:
        call()
    assert time.monotonic() - began < SOON_S
    return str(caught.value)


# -------------------------------------------------------------------- tags
def without_tags(folder: str) -> None:
    engine = start(1, seed=0)
    states = []
    for step in range(2):
        steps(engine, step, step + 1)
        assert engine.save_checkpoint(folder) is True
        states.append(weights(engine))
    assert not same(*states), "vacuous"
    assert Path(folder, "latest").read_text() == "global_step2"
    other = start(3, seed=1)
    assert other.load_checkpoint(folder) == (f"{folder}/global_step2", {})
    assert same(weights(other), states[1])
    assert other.load_checkpoint(folder, "global_step1")[0] == f"{folder}/global_step1"
    assert same(weights(other), states[0])
    assert engine.save_checkpoint(folder, tag=7, client_state={"epoch": 1})  # scripts pass the step
    assert other.load_checkpoint(folder) == (f"{folder}/7", {"epoch": 1})
    for wrong in ("", None):
        refused(lambda wrong=wrong: engine.save_checkpoint(wrong), f"folder is {wrong!r}")
        refused(lambda wrong=wrong: engine.load_checkpoint(wrong), f"is {wrong!r}: expected the path")
    for wrong in ("../out", "/tmp/out", "latest", ".", "a\0b"):
        refused(lambda wrong=wrong: engine.save_checkpoint(folder, wrong), "expected the name of a folder inside")


def test_without_a_tag_every_save_has_a_folder_of_its_own(tmp_path: Path) -> None:
    run_ranks(without_tags, 2, str(tmp_path))
    tags = ["7", "global_step1", "global_step2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*tags, "latest", "zero_to_fp32.py"]


def nothing_there(folder: str) -> None:
    engine = start(2, seed=0)
    before = weights(engine)
    for empty in (folder, folder + "/nowhere"):
        assert engine.load_checkpoint(empty) == (None, {})
    assert same(weights(engine), before)
    refused(lambda: engine.load_checkpoint(folder, "tag"), "tag holds no complete checkpoint")
    refused(lambda: engine.load_checkpoint(__file__), "is a file")
    engine.save_checkpoint(folder, "kept", save_latest=False)
    refused(lambda: engine.load_checkpoint(folder), r"inside it is .*kept")  # not as if there were none
    if engine.rank == 0:
        Path(folder, "torn/zero").mkdir(parents=True)
    dist.barrier()
    refused(lambda: engine.load_checkpoint(folder + "/torn"), "holds no complete checkpoint")
    engine.write_checkpoint(folder)  # as before there were tags
    assert engine.load_checkpoint(folder) == (folder, {})


def test_an_empty_folder_is_a_warning_and_a_torn_one_an_error(tmp_path: Path) -> None:
    run_ranks(nothing_there, 2, str(tmp_path))


# -------------------------------------------------------------------- ranks that do not agree
def disagreeing(stage: int, folder: str) -> None:
    engine = start(stage, seed=0, tag_validation="Fail")
    for tag in ("a", "b"):
        steps(engine, 0, 1)
        engine.save_checkpoint(folder, tag)
    before = listing(folder)
    mine = "ab"[engine.rank]
    for call in (
        lambda: engine.save_checkpoint(folder, mine),
        lambda: engine.save_checkpoint(f"{folder}/{mine}", "c"),
        lambda: engine.write_checkpoint(f"{folder}/{mine}"),
        lambda: engine.load_checkpoint(folder, mine),
    ):
        text = refused(call, "the ranks do not agree, and nothing was (written|loaded)")
        assert f"rank 0: {folder}/a" in text and f"rank 1: {folder}/b" in text, text
    text = refused(lambda: engine.save_checkpoint(folder, mine if engine.rank else ""), "")
    assert f"rank 0: {folder}/global_step2" in text and f"rank 1: {folder}/b" in text
    text = refused(lambda: engine.save_checkpoint(folder, "a", save_latest=engine.rank == 0), "")
    assert "rank 1" in text and "save_latest=False" in text
    refused(lambda: engine.save_checkpoint(None if engine.rank else folder, "a"), "rank 1: .* folder is None")
    refused(lambda: engine.load_checkpoint(folder, "a", load_module_only=engine.rank == 0), "optimizer=False")
    assert listing(folder) == before
    os.chdir(Path(folder, mine))  # a relative path means another folder on every rank
    text = refused(lambda: engine.save_checkpoint("out"), "")
    assert f"rank 0: {folder}/a/out" in text and f"rank 1: {folder}/b/out" in text
    refused(lambda: engine.load_checkpoint("."), "rank 0: ., step 1, .*\n.*rank 1: ., step 2, ")
    assert listing(folder) == before
    assert engine.load_checkpoint("..", "a")[0] == "../a"


def other_tags(folder: str) -> None:
    """The key does what DeepSpeed's does, but for what is written: one checkpoint, of rank 0's tag."""
    said: list[str] = []
    logging.getLogger("hf_zero.checkpoint.agreement").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    for validation, warnings in (("Warn", 1), ("Ignore", 0)):
        engine = start(1, seed=0, tag_validation=validation)
        mine = f"{validation}-{engine.rank}"
        said.clear()
        engine.save_checkpoint(folder, mine)
        assert len(said) == (warnings if engine.rank == 0 else 0), said
        assert not warnings or engine.rank or f"['Warn-0', 'Warn-1']. That of rank 0 counts: '{mine}'" in said[0]
        assert engine.load_checkpoint(folder)[0] == f"{folder}/{validation}-0"
        refused(lambda engine=engine: engine.save_checkpoint(f"{folder}/{engine.rank}", "a"), "do not agree")
    assert sorted(path.name for path in Path(folder).iterdir()) == ["Ignore-0", "Warn-0", "latest", "zero_to_fp32.py"]


def test_of_tags_that_differ_one_counts_where_the_configuration_allows_it(tmp_path: Path) -> None:
    run_ranks(other_tags, 2, str(tmp_path))


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_name_different_folders_write_nothing(stage: int, tmp_path: Path) -> None:
    run_ranks(disagreeing, 2, stage, str(tmp_path))


# -------------------------------------------------------------------- one rank fails alone
def load_with_a_fault(stage: int, folder: str, place: str) -> None:
    engine = start(stage, seed=0)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder, "a")
    want = weights(engine)
    steps(engine, 2, 3)
    faulty = engine.rank == 1
    read, method = DirectFile.read, CheckpointReader.read_buffer
    count = 0

    def failing(read: Callable[..., None]) -> Any:
        def failing_read(self: DirectFile, *args: Any) -> None:
            nonlocal count
            count += 1
            if faulty and (place == "first read" or count > 12):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
            read(self, *args)

        return failing_read

    def buffer(self: CheckpointReader, name: str) -> torch.Tensor:
        if faulty:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return method(self, name)

    if place == "buffer":
        CheckpointReader.read_buffer = buffer  # type: ignore[method-assign]
    else:
        DirectFile.read = failing(read)  # type: ignore[method-assign]
    text = refused(lambda: engine.load_checkpoint(folder, "a"), r"rank 1: .*Input/output error")
    assert ("calls" if place == "buffer" else "rank-0000") in text, text
    assert ("load a complete checkpoint" in text) == (place != "first read"), "what is still unchanged"
    DirectFile.read, CheckpointReader.read_buffer = read, method  # type: ignore[method-assign]
    engine.load_checkpoint(folder, "a")
    assert same(weights(engine), want)


@pytest.mark.parametrize(
    ("stage", "place"), [(0, "later"), (1, "first read"), (1, "buffer"), (3, "first read"), (3, "later")]
)
def test_a_rank_that_cannot_read_is_heard_by_all_at_once(stage: int, place: str, tmp_path: Path) -> None:
    """Stage 3 here has persistent units, which are gathered after a load as parameters of stage 1 are."""
    run_ranks(load_with_a_fault, 2, stage, str(tmp_path), place)


def load_a_damaged_block(stage: int, folder: str) -> None:
    """It is found where it is read, in the middle of a load: nobody trains on with half of one."""
    engine = start(stage, seed=0)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder, "a")
    want = weights(engine)
    path = Path(folder, "a", "zero", "rank-00001.safetensors")
    content = path.read_bytes()
    for data in (content[:-1] + bytes([content[-1] ^ 1]), content):
        engine.comm.barrier("read")
        if engine.rank == 0:
            path.write_bytes(data)
        engine.comm.barrier("written")
        if data != content:
            text = refused(lambda: engine.load_checkpoint(folder, "a"), f"{path} is damaged: wrong checksum, block 0")
            assert "holds a part of" in text
            with pytest.raises(hf_zero.StateError, match="after the broken load"):
                engine.save_checkpoint(folder, "b")
    engine.load_checkpoint(folder, "a")
    assert same(weights(engine), want)
    steps(engine, 2, 3)


def test_a_damaged_block_is_found_by_the_load_that_reads_it(tmp_path: Path) -> None:
    run_ranks(load_a_damaged_block, 2, 1, str(tmp_path))


# -------------------------------------------------------------------- parameter groups and states
def grouped(count: int, fused: bool | None = None) -> Any:
    torch.manual_seed(0)
    model = Net()
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[i::count], "lr": 0.1 * (i + 1)} for i in range(count)]
    optimizer = torch.optim.AdamW(groups, fused=fused)
    return hf_zero.initialize(model=model, optimizer=optimizer, config={"zero_optimization": {"stage": 1}})[0]


def other_groups(folder: str) -> None:
    engine = grouped(2)
    steps(engine, 0, 1)
    engine.save_checkpoint(folder, "two")
    for count in (1, 3):
        other = grouped(count)
        before = weights(other)
        refused(lambda other=other: other.load_checkpoint(folder), rf"2 parameter group\(s\), .* has {count}")
        assert same(weights(other), before), "it was refused too late"
        other.load_checkpoint(folder, load_optimizer_states=False)
        assert same(weights(other), weights(engine))
    other = grouped(2, fused=True)
    for group in other.optimizer.param_groups:
        group["lr"] = 7.0
    other.load_checkpoint(folder)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.1, 0.2]
    assert all(group["fused"] is True for group in other.optimizer.param_groups), "how to compute is the run's own"


def moved(stage: int, folder: str, offload: str) -> None:
    """The groups are as many as before, with other parameters in them: torch takes it, and gives every one the other's
    rate.
    """
    engine = split(stage, offload)
    steps(engine, 0, 1)
    engine.save_checkpoint(folder, "a")
    other = split(stage, offload, turned=True)
    text = refused(lambda: other.load_checkpoint(folder), "in another parameter group")
    assert "up.bias was in group 1 and is in group 0" in text or "weight was in group 0 and is in group 1" in text
    split(stage, offload).load_checkpoint(folder)
    equal, turned = split(stage, offload, rates=(0.1, 0.1)), split(stage, offload, rates=(0.1, 0.1), turned=True)
    equal.save_checkpoint(folder, "equal")
    turned.load_checkpoint(folder)  # nothing to mix up


def split(stage: int, offload: str, rates: tuple[float, float] = (0.1, 0.2), turned: bool = False) -> Any:
    torch.manual_seed(0)
    model = Net()
    params = [param for param in model.parameters() if param.requires_grad]
    halves = [[param for param in params if param.dim() > 1], [param for param in params if param.dim() == 1]]
    groups = [
        {"params": half, "lr": rate} for half, rate in zip(halves[::-1] if turned else halves, rates, strict=True)
    ]
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": offload}
    return hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(groups), config={"zero_optimization": zero})[0]


@pytest.mark.parametrize(("stage", "offload"), [(1, ""), (3, ""), (2, "cpu")])
def test_parameters_that_have_changed_groups_are_refused(stage: int, offload: str, tmp_path: Path) -> None:
    run_ranks(moved, 2, stage, str(tmp_path), offload)


def test_other_parameter_groups_are_refused(tmp_path: Path) -> None:
    run_ranks(other_groups, 2, str(tmp_path))


def devices(folder: str) -> None:
    """The meta device stands for an accelerator: only there the two are apart."""
    engine = grouped(1)
    steps(engine, 0, 1)
    engine.save_checkpoint(folder, "a")
    with open_checkpoint(Path(folder, "a")) as reader:
        owned = next(owned for owned in engine.optimizer.owned if owned.slice.numel > 1)
        there = [torch.empty_like(master, device="meta") for master in owned.masters]
        reference = torch.nn.Parameter(torch.empty(2, device="meta"))
        for flags in ({}, {"fused": True}, {"capturable": True}, {"fused": None, "capturable": False}):
            for state in read_states(reader, owned.slice.name, owned.slice, there, flags):
                groups = [{"params": [0], **flags}]
                want = torch.optim.Optimizer._process_value_according_to_param_policy(
                    reference, torch.tensor(1.0), 0, groups, "step"
                )
                assert state["step"].device == want.device and state["step"].dtype == want.dtype, flags
                assert state["exp_avg"].device.type == "meta"


def test_the_step_is_where_its_kernels_read_it(tmp_path: Path) -> None:
    run_ranks(devices, 1, str(tmp_path))


class Counting(torch.optim.Optimizer):
    """Keeps numbers of several kinds, as DeepSpeed's tests have them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if not state:
                state["python"] = 0
                state["one"] = torch.zeros(1)
                state["square"] = torch.zeros(1, 1, dtype=torch.float64)
                state["whole"] = torch.zeros((), dtype=torch.int64)
                state["plain"] = torch.zeros(())
            param.add_(param.grad, alpha=-0.1)
            for key in ("python", "one", "square", "whole", "plain"):
                state[key] += 1
            state["square"] += 1e-9  # lost in float32


def counting() -> Any:
    torch.manual_seed(0)
    model = Net()
    config = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    params = [param for param in model.parameters() if param.requires_grad]
    return hf_zero.initialize(model=model, optimizer=Counting(params), config=config)[0]


def numbers(folder: str) -> None:
    engine, other = counting(), counting()
    steps(engine, 0, 3)
    engine.save_checkpoint(folder)
    other.load_checkpoint(folder)
    saved, loaded = list(engine.optimizer.state.values()), list(other.optimizer.state.values())
    assert len(saved) == len(loaded) > 0 and saved[0]["python"] == 3
    for one, two in zip(saved, loaded, strict=True):
        assert one.keys() == two.keys()
        for key, value in one.items():
            assert type(two[key]) is type(value), key
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(two[key], value, rtol=0, atol=0, msg=key)
    tensors = [state["one"] for state in loaded]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors), "each has its own"


def test_numbers_keep_kind_type_and_shape(tmp_path: Path) -> None:
    run_ranks(numbers, 2, str(tmp_path))
