"""scheduler.pt and rng_state*.pth of a Trainer's checkpoint folder: written by one rank alone, read by each."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_pt_utils import reissue_pt_warnings

from hf_zero.distributed.comm import Comm
from hf_zero.errors import CheckpointError
from hf_zero.hf.local_files import read_on_all, writing
from hf_zero.optim.schedules.base import Schedule


def rng_state_file(trainer: Any, folder: str) -> str:
    """Of this rank, as Trainer names it."""
    args = trainer.args
    return os.path.join(folder, f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth")


def write_scheduler(trainer: Any, folder: str) -> None:
    path = os.path.join(folder, SCHEDULER_NAME)
    with warnings.catch_warnings(record=True) as caught, writing(path):
        torch.save(trainer.lr_scheduler.state_dict(), path)
    reissue_pt_warnings(caught)


def read_scheduler(trainer: Any, comm: Comm, folder: str) -> None:
    """All ranks must call. Raises CheckpointError on every rank: no such file, damaged, or of another schedule."""
    path = os.path.join(folder, SCHEDULER_NAME)

    def read() -> None:
        if not os.path.isfile(path):
            raise CheckpointError(f"cannot resume from {folder}: {SCHEDULER_NAME} is missing.")
        with warnings.catch_warnings(record=True) as caught:
            state = torch.load(path, weights_only=True)
        reissue_pt_warnings(caught)
        _check_schedule(trainer.lr_scheduler, state, folder)
        trainer.lr_scheduler.load_state_dict(state)

    read_on_all(comm, path, read)


def _check_schedule(scheduler: Any, state: dict[str, Any], checkpoint: str) -> None:
    """A schedule of the configuration and one of Trainer's keep different states."""
    if ("last_batch_iteration" in state) == isinstance(scheduler, Schedule):
        return
    how = "with" if "last_batch_iteration" in state else "without"
    raise CheckpointError(
        f"cannot resume from {checkpoint}: it was written {how} a scheduler block, and this run's schedule is "
        f"{type(scheduler).__name__}. Use the same configuration, or start anew from its weights."
    )
