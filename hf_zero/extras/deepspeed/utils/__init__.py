"""`from deepspeed.utils import logger, log_dist, RepeatingLoader`, with the name changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from hf_zero.extras.pipeline.micro_batches import RepeatingLoader

__all__ = ["RepeatingLoader", "log_dist", "logger"]

logger = logging.getLogger("hf_zero")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks, with the rank before it; [-1] means all of them. Any rank may call.

    Without a process group every process logs, as rank -1; with one and no `ranks` nobody does, as with DeepSpeed.
    """
    rank = dist.get_rank() if dist.is_initialized() else -1
    chosen = ranks or []
    if rank == -1 or -1 in chosen[:1] or rank in chosen:
        logger.log(level, "[Rank %d] %s", rank, message)
