"""A run of hf_zero goes on under DeepSpeed, through its own files and through the universal format, and back: losses.

hf_zero trains on 2 ranks and saves; `hf-zero convert to-deepspeed`, and DeepSpeed goes on, at another stage too.
The same with `hf-zero convert to-universal`; DeepSpeed goes on, saves, and its own
ds_to_universal converts that; `hf-zero convert from-universal`; hf_zero goes on. Every loss is compared with those of
a run of hf_zero that was never interrupted. DeepSpeed is in the extra [peers]; 5 minutes on 2 cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import hf_zero
from hf_zero.conversion.to_deepspeed import to_deepspeed
from hf_zero.conversion.universal import from_universal, to_universal
from hf_zero.extras.launcher.node import free_port
from tests.conversion.tiny_model import ROWS, batch, groups, tiny_model

RANKS, FIRST, SECOND, LAST = 2, 3, 8, 13
TOLERANCE = 1e-5
ACCELERATOR_HAS_FP16 = torch.accelerator.is_available()
HALF_TOLERANCE = 5e-3  # of 16-bit computation, in which the two do not add up in one order


def configuration(stage: int, own_adam: bool, precision: str, deepspeed: bool, universal: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // RANKS,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 6}},
    }
    if precision:
        config[precision] = {"enabled": True, **({"initial_scale_power": 4} if precision == "fp16" else {})}
    if deepspeed:
        config |= {"checkpoint": {"load_universal": universal}, "zero_allow_untested_optimizer": True}
    if own_adam:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    return config


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def work(rank: int, port: int, job: dict[str, Any]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    model = tiny_model(seed=0)
    own, deepspeed = job["own_adam"], job["tool"] == "deepspeed"
    source: dict[str, Any] = {"model_parameters": groups(model)}
    if not own:
        source = {"optimizer": torch.optim.AdamW(groups(model), lr=1e-2)}
    if deepspeed:
        import deepspeed as tool

        tool.init_distributed(dist_backend="gloo", verbose=False)
    else:
        tool = hf_zero
    config = configuration(job["stage"], own, job.get("precision", ""), deepspeed, job.get("universal", True))
    engine = tool.initialize(model=model, config=config, **source)[0]
    if "load" in job:
        assert engine.load_checkpoint(job["load"])[0] is not None
        if deepspeed and job["stage"] == 3 and job.get("universal", True):  # as `hf-zero convert to-universal` says
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = state["step"].clone()
    losses = train(engine, job["first"], job["middle"])
    engine.save_checkpoint(job["save"], client_state={"epoch": 3})
    losses += train(engine, job["middle"], job["last"])
    if rank == 0:
        Path(job["save"], "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def run(**job: Any) -> list[float]:
    mp.spawn(work, (free_port(), job), nprocs=RANKS)
    losses: list[float] = json.loads(Path(job["save"], "losses.json").read_text())
    return losses


def deepspeeds_converter(saved: Path, target: Path, step: int) -> None:
    tag = f"global_step{step}"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(saved / tag), "--output_folder", str(target / tag)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def there_and_back(stage: int, other_stage: int, own_adam: bool, folder: Path) -> float:
    """The greatest difference of a loss; see the module."""
    common = {"own_adam": own_adam}
    wanted = run(tool="hf_zero", stage=stage, first=0, middle=FIRST, last=LAST, save=str(folder / "a"), **common)
    to_universal(folder / "a", folder / "b")
    part = {"tool": "deepspeed", "stage": other_stage, "first": FIRST, "middle": SECOND, "last": SECOND}
    there = run(load=str(folder / "b"), save=str(folder / "c"), **part, **common)
    deepspeeds_converter(folder / "c", folder / "d", SECOND)
    from_universal(folder / "d", folder / "e")
    part = {"tool": "hf_zero", "stage": stage, "first": SECOND, "middle": LAST, "last": LAST}
    back = run(load=str(folder / "e"), save=str(folder / "f"), **part, **common)
    assert max(wanted) - min(wanted) > 1e-2, "vacuous: nothing was trained"
    return max(abs(one - other) for one, other in zip(there + back, wanted[FIRST:], strict=True))


def there(stage: int, other_stage: int, own_adam: bool, precision: str, folder: Path) -> float:
    """The greatest difference of a loss, through DeepSpeed's own files."""
    common = {"own_adam": own_adam, "precision": precision}
    wanted = run(tool="hf_zero", stage=stage, first=0, middle=FIRST, last=SECOND, save=str(folder / "a"), **common)
    to_deepspeed(folder / "a", folder / "b", stage=other_stage)
    part = {"tool": "deepspeed", "stage": other_stage, "first": FIRST, "middle": SECOND, "last": SECOND}
    found = run(load=str(folder / "b"), save=str(folder / "c"), universal=False, **part, **common)
    assert max(wanted) - min(wanted) > 1e-2, "vacuous: nothing was trained"
    return max(abs(one - other) for one, other in zip(found, wanted[FIRST:], strict=True))


OWN_FILES = [
    (1, 1, False, ""),
    (2, 2, False, ""),
    (3, 3, False, ""),
    (3, 3, True, ""),
    (0, 1, True, ""),
    (2, 3, True, ""),
    (3, 2, False, ""),
    (2, 2, False, "bf16"),
    (3, 3, False, "bf16"),
]
if ACCELERATOR_HAS_FP16:  # DeepSpeed refuses the type on CPUs
    OWN_FILES.append((2, 2, False, "fp16"))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")


@pytest.mark.parametrize(("stage", "other_stage", "own_adam", "precision"), OWN_FILES)
def test_deepspeed_goes_on_from_its_own_files(
    stage: int, other_stage: int, own_adam: bool, precision: str, tmp_path: Path
) -> None:
    assert there(stage, other_stage, own_adam, precision, tmp_path) <= (HALF_TOLERANCE if precision else TOLERANCE)


@pytest.mark.parametrize(
    ("stage", "other_stage", "own_adam"),
    [(2, 1, False), (2, 2, False), (2, 3, True), (3, 1, True), (3, 2, False), (3, 3, False)],
)
def test_deepspeed_goes_on_and_hf_zero_after_it(stage: int, other_stage: int, own_adam: bool, tmp_path: Path) -> None:
    assert there_and_back(stage, other_stage, own_adam, tmp_path) <= TOLERANCE
