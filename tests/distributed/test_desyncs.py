"""One rank does something that the others do not: every rank says so within ten seconds, and says what.

`python -m tests.distributed.test_desyncs` prints a table of all of them, with the timeouts of training.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import hf_zero
from hf_zero import errors
from hf_zero.distributed.operation_log import OperationLog
from hf_zero.distributed.torch_calls import TorchCall, TorchCallCheck
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ZeroError
from tests.harness import ranks, save_faults
from tests.harness.at_night import all_at_night
from tests.harness.ranks import Ended, RankFailure, run_ranks, try_ranks
from tests.hf import runs

SOON_S = 10.0
STEPS_BEFORE, STEPS_AFTER = 1, 4
WEIGHT = "model.layers.1.mlp.up_proj.weight"
_TOOK = re.compile(r"^after ([\d.]+) s$", re.MULTILINE)


class Run:
    """The training of one rank, and the folder into which all of them save."""

    def __init__(self, stage: int, accumulation: int, folder: str, layers: int = 3) -> None:
        self.folder = folder
        self.row = torch.arange(12)[None] % runs.VOCAB
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        model = runs.build()
        del model.model.layers[layers:]
        self.engine: ZeroEngine = hf_zero.initialize(model=model, config=config)[0]
        self.layer = model.model.layers[1]
        self.weight = model.get_parameter(WEIGHT)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.engine(input_ids=self.row, labels=self.row).loss
        return loss

    def step(self) -> None:
        self.engine.backward(self.loss())
        self.engine.step()


@dataclasses.dataclass(frozen=True)
class Fault:
    """The act of the last rank between two steps, and the words by which the others know it."""

    act: Callable[[Run], object]
    says: str  # a pattern
    stage: int = 3
    world_size: int = 2
    accumulation: int = 1
    others: Callable[[Run], object] = lambda run: None  # what the other ranks do meanwhile
    is_the_end: bool = False  # the rank takes no further steps


# ---------------------------------------------------------------- what a rank does
def _evaluate(run: Run) -> None:
    with torch.no_grad():
        run.loss()


def _backward_twice(run: Run) -> None:
    loss = run.loss()
    run.engine.backward(loss, retain_graph=True)
    run.engine.backward(loss)


def _skip_backward(run: Run) -> None:
    run.loss()
    run.engine.step()


def _kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(*_: object) -> None:
    raise ValueError("a mistake in the script of one rank")


def _run_out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _in_forward(act: Callable[..., None]) -> Callable[[Run], object]:
    return lambda run: run.layer.register_forward_pre_hook(act)


def _in_backward(act: Callable[..., None]) -> Callable[[Run], object]:
    return lambda run: run.layer.mlp.register_forward_hook(lambda _, __, out: out.register_hook(act) and None)


def _in_step(act: Callable[..., None]) -> Callable[[Run], object]:
    def wrap(run: Run) -> None:
        assert run.engine.optimizer is not None
        run.engine.optimizer.register_step_pre_hook(act)

    return wrap


class _Torn(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise OSError("cannot read the sample")


def _read_data(run: Run) -> None:
    list(DataLoader(_Torn(), num_workers=1))


def _kill_in_save(run: Run) -> None:
    save_faults.at("tensors are written", _kill)
    _save(run)


def _save(run: Run) -> None:
    run.engine.save_checkpoint(run.folder)


def _full(*names: str) -> Callable[[Run], None]:
    def read(run: Run) -> None:
        for name in names:
            hf_zero.full_param(run.engine.module.get_parameter(name))

    return read


def _barrier(run: Run) -> None:
    dist.barrier()


def _gather_objects(run: Run) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), "loss")


def _return(run: Run) -> None:
    pass


ENDED = r"rank\(s\) \[[12]\] have ended"
MISTAKE = "rank [12] of [23] .*ValueError: a mistake in the script of one rank"
IN_TORCH = r"for rank [12], which waits in torch's {}(?s:.*)test_desyncs.py:\d+ \((_barrier|_gather_objects)\)"
FAULTS: dict[str, Fault] = {
    "saves a checkpoint alone": Fault(_save, "save_checkpoint"),
    "saves a checkpoint alone, stage 2": Fault(_save, "save_checkpoint", stage=2, world_size=3),
    "saves alone, the others wait in torch's barrier": Fault(_save, "save_checkpoint", others=_barrier),
    "saves 16-bit weights alone": Fault(lambda run: run.engine.save_16bit_model(run.folder), "save_16bit_model|full"),
    "calls save_pretrained alone": Fault(lambda run: run.engine.module.save_pretrained(run.folder), "save_pretrained"),
    "asks for all weights alone": Fault(lambda run: run.engine.full_state_dict(keep=True), "full_state_dict"),
    "asks for one weight alone": Fault(_full(WEIGHT), "full_param"),
    "loads a checkpoint alone": Fault(lambda run: run.engine.load_checkpoint(run.folder), "load_checkpoint"),
    "reads a sharded weight alone": Fault(lambda run: run.weight.sum(), "layers.1"),
    "evaluates alone": Fault(_evaluate, "all_gather|forward"),
    "calls torch's barrier alone": Fault(_barrier, IN_TORCH.format("barrier"), world_size=3),
    "gathers objects alone, stage 2": Fault(_gather_objects, IN_TORCH.format("all_gather_object"), stage=2),
    "generates alone": Fault(lambda run: run.engine.module.generate(run.row, max_new_tokens=3), "generate"),
    "calls backward twice": Fault(_backward_twice, "rank 1: reduce_scatter", stage=2),
    "steps twice": Fault(lambda run: run.engine.step(), "rank 1: vote step", stage=2),
    "skips a backward": Fault(_skip_backward, "rank 1: vote step", stage=2),
    "clears gradients inside an accumulation": Fault(
        lambda run: run.engine.zero_grad(), "rank 1: dropped all", accumulation=2
    ),
    "leaves the loop, and ends": Fault(_return, ENDED, is_the_end=True, world_size=3),
    "leaves the loop, and saves": Fault(_save, "save_checkpoint", is_the_end=True, stage=2),
    "leaves the loop, and tears the engine down": Fault(
        lambda run: run.engine.teardown(), "engine.teardown", is_the_end=True
    ),
    "raises in forward": Fault(_in_forward(_raise), MISTAKE, world_size=3),
    "raises in backward": Fault(_in_backward(_raise), MISTAKE),
    "raises in the optimizer": Fault(_in_step(_raise), MISTAKE, stage=2),
    "raises in a data loader": Fault(_read_data, "rank 1 .*OSError: .*cannot read the sample", stage=2),
    "runs out of memory": Fault(_in_forward(_run_out_of_memory), "rank 1 .*OutOfMemoryError: CUDA out of memory"),
    "is killed in forward": Fault(_in_forward(_kill), ENDED, world_size=3),
    "is killed in backward": Fault(_in_backward(_kill), ENDED, stage=2),
    "is killed in the optimizer": Fault(_in_step(_kill), ENDED),
    "is killed in a save": Fault(_kill_in_save, ENDED, others=_save),
    "reads two weights in another order": Fault(
        _full(WEIGHT, "model.norm.weight"), "full_param", others=_full("model.norm.weight", WEIGHT)
    ),
}
ACCUMULATES, OTHER_MODEL = "accumulates over other batches", "builds another model"
BUILT = {
    ACCUMULATES: Fault(_return, "gradient_accumulation_steps"),
    OTHER_MODEL: Fault(_return, "layers.2"),
}


def meet(name: str, folder: str) -> str:
    """Train until the fault of the last rank is noticed. The error has a note of the seconds since the fault."""
    fault = {**FAULTS, **BUILT}[name]
    is_at_fault = dist.get_rank() == dist.get_world_size() - 1
    began = time.monotonic()
    try:
        run = Run(
            fault.stage,
            fault.accumulation + (is_at_fault and name == ACCUMULATES),
            folder,
            3 - (is_at_fault and name == OTHER_MODEL),
        )
        for _ in range(STEPS_BEFORE):
            run.step()
        dist.barrier()
        began = time.monotonic()
        (fault.act if is_at_fault else fault.others)(run)
        for _ in range(0 if is_at_fault and fault.is_the_end else STEPS_AFTER):
            run.step()
        if is_at_fault and fault.is_the_end:
            sys.exit()
    except BaseException as error:
        error.add_note(f"after {time.monotonic() - began:.1f} s")
        raise
    return "went on"


def provoke(name: str, timeout_s: float, timeouts: dict[str, float]) -> tuple[Fault, Ended]:
    fault = {**FAULTS, **BUILT}[name]
    with tempfile.TemporaryDirectory() as folder:
        return fault, try_ranks((meet, (name, folder), {}), fault.world_size, timeout=timeout_s, timeouts=timeouts)


def seconds(outcome: Any) -> float:
    """Return how long after the fault a rank raised; 0 where it died, or left."""
    found = _TOOK.search(outcome.traceback) if isinstance(outcome, RankFailure) else None
    return float(found[1]) if found else 0.0


def problems(fault: Fault, ended: Ended) -> Iterator[str]:
    """Yield what is wrong with the end of a job."""
    if ended.hang:
        yield ended.hang
    for rank, outcome in enumerate(ended.outcomes[:-1]):
        kind = getattr(errors, getattr(outcome, "kind", ""), None)
        if outcome == "went on":
            yield f"rank {rank} went on"
        elif kind is None or not issubclass(kind, ZeroError):
            if fault.others is not _barrier:  # it waits for torch, which says what it can
                yield f"rank {rank} raised {outcome.kind}: {outcome.message}"
        elif not re.search(fault.says, outcome.message):
            yield f"rank {rank} does not say {fault.says!r}: {outcome.message}"
        elif "Called from: " not in outcome.message and name_of(fault) not in BUILT:
            yield f"rank {rank} does not name the line of its call: {outcome.message}"
    in_torch = [one for one in ended.outcomes if getattr(one, "kind", "") == "RuntimeError"]
    if in_torch and "another rank had stopped before:\nrank" not in ended.logs:
        yield f"a rank that waits for torch says only: {in_torch[0].message}"
    slowest = max(map(seconds, ended.outcomes))
    if slowest > SOON_S:
        yield f"the last rank raised after {slowest} s"


def name_of(fault: Fault) -> str:
    return next(name for name, one in {**FAULTS, **BUILT}.items() if one is fault)


BY_DAY = (
    "saves a checkpoint alone",
    "evaluates alone",
    "calls torch's barrier alone",
    "steps twice",
    "raises in forward",
    "is killed in forward",
    "leaves the loop, and tears the engine down",
    *BUILT,
)


@pytest.mark.parametrize("name", all_at_night([*FAULTS, *BUILT], BY_DAY))
def test_every_rank_says_what_one_rank_did(name: str) -> None:
    fault, ended = provoke(name, 40, {"grace": 0.5, "stalled": 0.2, "presence": 2.0})
    assert not list(problems(fault, ended)), "\n".join(problems(fault, ended))


def stop_a_while(call: str, folder: str) -> int:
    """The last rank is stopped for two seconds: the others wait, and train on."""
    run = Run(3, 1, folder)
    pids = run.engine.comm.all_gather_object(os.getpid(), "processes")
    if run.engine.rank == 0:
        threading.Timer(2.0, os.kill, (pids[1], signal.SIGCONT)).start()
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    run.step() if call == "forward" else _save(run)
    run.step()
    return run.engine.global_steps


@pytest.mark.parametrize(("call", "waited_for"), [("forward", "all_gather root"), ("save", "call save_checkpoint")])
def test_who_waits_for_a_rank_that_is_alive_says_so(call: str, waited_for: str, tmp_path: Path) -> None:
    timeouts = {"stalled": 0.2, "say_every": 1.0}
    ended = try_ranks((stop_a_while, (call, str(tmp_path)), {}), 2, timeout=40, timeouts=timeouts)
    assert ended.outcomes == [2 - (call == "save")] * 2, ended
    said = r"rank\(s\) \[0\] have waited 1 s for rank\(s\) \[1\], which are alive and have not come to "
    assert len(re.findall(said + waited_for, ended.logs)) == 1, ended.logs


def reduce_in_two_ways(folder: str) -> int:
    """Rank 0 begins torch's reduce and goes on to wait in the engine; rank 1 waits in it, and rank 2 comes late."""
    run = Run(3, 1, folder)
    run.step()
    number = torch.ones(1)
    if dist.get_rank() == 2:
        time.sleep(2.0)
    work = dist.all_reduce(number, async_op=dist.get_rank() == 0)
    run.step()
    if work is not None:
        work.wait()
    assert number == 3
    return run.engine.global_steps


def test_a_slow_rank_is_no_mistake(tmp_path: Path) -> None:
    ended = try_ranks((reduce_in_two_ways, (str(tmp_path),), {}), 3, timeout=60, timeouts={"stalled": 0.2})
    assert ended.outcomes == [2] * 3, ended


def look_with_the_collector_on() -> list[bool]:
    """Return whether garbage might be collected while frames are made, and whether it may be afterwards."""
    check = TorchCallCheck(OperationLog(), dist.distributed_c10d._get_default_store, "here")
    frames, might = sys._current_frames, []

    def current_frames() -> Any:
        might.append(gc.isenabled())
        return frames()

    with unittest.mock.patch.object(sys, "_current_frames", current_frames):
        check.look()
    return [*might, gc.isenabled()]


def test_no_garbage_is_collected_while_frames_are_made() -> None:
    """Python up to 3.11 would stop for good: _no_garbage_collection says how."""
    assert run_ranks(look_with_the_collector_on, 1, timeouts={"stalled": 0.0}) == [[False, True]]


def errors_by_position() -> list[bool]:
    """Return whether this rank, which has started one operation, is said to be waited for by one that started 0, 1."""
    log, store = OperationLog(), dist.distributed_c10d._get_default_store()
    log.add("all_gather", "root")
    check = TorchCallCheck(log, lambda: store, "here")
    said = []
    for position in (0, 1):
        call = TorchCall(1, "barrier", dist.group.WORLD.group_name, 99, position, "train.py:1")
        store.set("here/torch call", json.dumps(dataclasses.asdict(call)))
        said.append(check.deadlock() is not None)
    return said


def test_a_rank_in_torch_that_has_started_as_much_is_not_waited_for() -> None:
    assert run_ranks(errors_by_position, 1) == [[True, False]]


def main() -> None:
    print("| one rank | seconds | what the ranks raise |\n|---|---|---|")
    for name in sys.argv[1:] or [*FAULTS, *BUILT]:
        fault, ended = provoke(name, 45, {"grace": 5.0, "stalled": 1.0, "presence": 9.0})
        said = []
        for rank, one in enumerate(ended.outcomes):
            first = " / ".join(one.message.splitlines()[:4])[:330] if isinstance(one, RankFailure) else str(one)
            said.append(f"{rank} ({seconds(one):.1f} s): {getattr(one, 'kind', '')} {first}")
        wrong = "; ".join(text[:700] for text in problems(fault, ended))
        print(f"| {name} | {max(map(seconds, ended.outcomes)):.1f} | {'<br>'.join(said)} |", flush=True)
        if wrong:
            print(f"    WRONG: {wrong}", flush=True)
    ranks.close()


if __name__ == "__main__":
    from tests.distributed import test_desyncs

    test_desyncs.main()
