"""Makes tests/conversion/data: checkpoints of DeepSpeed itself, and what it holds and computes behind them.

    DS_ACCELERATOR=cpu python scripts/make_deepspeed_checkpoints.py      (needs the extra [peers])

Each folder is a run of 2 or 4 gloo ranks: `latest` and the tag as DeepSpeed writes them, expected.safetensors (full
fp32 weights and optimizer states, as DeepSpeed's own access functions give them) and losses.json (the losses of the
next steps). Those with "universal" hold the same save also as DeepSpeed's ds_to_universal converts it.

tests/conversion/trainer_data is a checkpoint of transformers' Trainer with DeepSpeed, made with `trainer` as the run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_zero.extras.launcher.node import free_port  # noqa: E402
from tests.conversion import trainer_run  # noqa: E402
from tests.conversion.tiny_model import ROWS, STEPS_AFTER, STEPS_BEFORE, batch, groups, tiny_model  # noqa: E402

# Folder -> what its run differs in.
RUNS: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2": {"stage": 2, "universal": True},
    "stage3": {"stage": 3, "universal": True, "zero": {"stage3_param_persistence_threshold": 10}},
    "stage3-subgroups": {"stage": 3, "zero": {"sub_group_size": 20}},
    "stage2-bf16": {"stage": 2, "bf16": True},
    "stage3-bf16": {"stage": 3, "bf16": True},
    "stage1-bf16": {"stage": 1, "bf16": True, "grad_accum_dtype": "fp32"},
    "stage2-fp16": {"stage": 2, "fp16": True},
    "stage2-four-ranks": {"stage": 2, "world_size": 4},
    "stage3-four-ranks": {"stage": 3, "world_size": 4},
    "stage2-aligned": {"stage": 2, "zero": {"parameter_alignment": True, "round_robin_gradients": True}},
    "stage2-scheduler": {"stage": 2, "scheduler": True},
    "stage3-own-adam": {"stage": 3, "own_adam": True},
}


TRAINER = "trainer"


def world_size(run: dict[str, Any]) -> int:
    return int(run.get("world_size", 2))


def configuration(run: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // world_size(run),
        "zero_optimization": {"stage": run["stage"], **run.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
    }
    if run.get("fp16"):
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    if run.get("bf16"):
        config["bf16"] = {"enabled": True}
    if "grad_accum_dtype" in run:
        config["data_types"] = {"grad_accum_dtype": run["grad_accum_dtype"]}
    if run.get("own_adam"):
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    if run.get("scheduler"):
        params = {"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 6, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
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


def held(engine: Any) -> dict[str, torch.Tensor]:
    """Full fp32 weights and optimizer states by DeepSpeed's own functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # It links them before torch's AdamW has made any, and then finds none.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[f"{name}::master"] = safe_get_full_fp32_param(param)
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{name}::{kind}"] = safe_get_full_optimizer_state(param, kind)
    return {key: value.detach().float().clone().contiguous() for key, value in found.items()}


def join(rank: int, ranks: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)


def work(rank: int, name: str, port: int, out: Path) -> None:
    import deepspeed

    join(rank, world_size(RUNS[name]), port)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    run, model = RUNS[name], tiny_model(seed=0)
    if run.get("own_adam"):
        source: dict[str, Any] = {"model_parameters": groups(model)}
    else:
        source = {"optimizer": torch.optim.AdamW(groups(model), lr=1e-2)}
    engine, *_ = deepspeed.initialize(model=model, config=configuration(run), **source)
    train(engine, 0, STEPS_BEFORE)
    engine.save_checkpoint(str(out / name), client_state={"epoch": 3})
    tensors = held(engine)
    losses = train(engine, STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
    if rank == 0:
        save_file(tensors, str(out / name / "expected.safetensors"))
        (out / name / "losses.json").write_text(json.dumps(losses) + "\n")
        for script in (out / name).glob("*.py"):  # DeepSpeed's own scripts are not ours to keep
            script.unlink()
    dist.barrier()
    dist.destroy_process_group()


def work_under_trainer(rank: int, port: int, out: Path) -> None:
    from transformers import Trainer, TrainingArguments

    join(rank, 2, port)
    deepspeed = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}
    losses = trainer_run.train(TrainingArguments, Trainer, str(out / "run"), None, deepspeed=deepspeed)
    if rank == 0:
        saved = out / "run" / f"checkpoint-{trainer_run.SAVED_AT}"
        for path in [*saved.glob("*.py"), saved / "training_args.bin"]:
            path.unlink()
        (out / "losses.json").write_text(json.dumps(losses) + "\n")
        saved.rename(out / saved.name)
        shutil.rmtree(out / "run")


def convert(folder: Path) -> None:
    tag = folder / (folder / "latest").read_text()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(tag), "--output_folder", f"{tag}_universal"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "conversion" / "data")
    known = [*RUNS, TRAINER]
    parser.add_argument("runs", nargs="*", default=known, help=f"of {', '.join(known)}")
    args = parser.parse_args()
    if TRAINER in args.runs:
        mp.spawn(work_under_trainer, (free_port(), args.out.with_name("trainer_data")), nprocs=2)
    for name in (name for name in args.runs if name != TRAINER):
        shutil.rmtree(args.out / name, ignore_errors=True)
        mp.spawn(work, (name, free_port(), args.out), nprocs=world_size(RUNS[name]))
        if RUNS[name].get("universal"):
            convert(args.out / name)
        print(f"{name}: {sum(file.stat().st_size for file in (args.out / name).rglob('*.*'))} bytes")


if __name__ == "__main__":
    main()
