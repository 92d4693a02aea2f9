"""The loader of a rank's share of a dataset."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm


def share_loader(
    data: Dataset[Any],
    comm: Comm,
    config: ResolvedConfig,
    *,
    shuffle: bool,
    batch_size: int | None = None,
    sampler: Sampler[Any] | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """Return a loader of this rank's share of `data`; where ranks do not divide it, some samples come twice.

    Args:
        batch_size: None is the size of a micro-batch.
        sampler: Chooses the samples instead.
        options: The DataLoader's others.
    """
    if sampler is None:
        sampler = DistributedSampler(data, comm.world_size, comm.rank, shuffle)
    return DataLoader(
        data,
        batch_size=batch_size or config.train_micro_batch_size_per_gpu,
        sampler=sampler,
        drop_last=config.dataloader_drop_last,
        **options,
    )
