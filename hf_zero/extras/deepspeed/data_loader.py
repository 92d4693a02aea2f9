"""deepspeed.runtime.dataloader's DeepSpeedDataLoader: torch's loader of this rank's share of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from hf_zero.extras.deepspeed.accelerator import get_accelerator
from hf_zero.extras.deepspeed.out_of_scope import sentence_about


class DeepSpeedDataLoader(DataLoader[Any]):
    """torch's DataLoader with DeepSpeed's arguments.

    Args:
        local_rank: Where it is negative, one process has all the data, in batches for all of its devices.
        tput_timer: A ThroughputTimer that is started before each batch, or None.
        num_local_io_workers: The number of worker processes; None is two.
        data_parallel_world_size, data_parallel_rank: Whose share it is; None stands for the default group.
    Raises:
        NotImplementedError: The last argument asks for curriculum learning.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        if (deepspeed_dataloader_config or {}).get("curriculum_learning"):
            raise NotImplementedError(sentence_about("runtime.data_pipeline"))
        devices = get_accelerator().device_count() if local_rank < 0 else 1
        if data_sampler is None and local_rank >= 0:
            data_sampler = DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
        workers = 2 * devices if num_local_io_workers is None else num_local_io_workers
        super().__init__(
            dataset,
            batch_size * devices,
            sampler=RandomSampler(dataset) if data_sampler is None else data_sampler,  # type: ignore[arg-type]
            collate_fn=collate_fn,
            num_workers=workers,
            pin_memory=pin_memory,
            drop_last=dataloader_drop_last,
        )
        self.tput_timer = tput_timer

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        for _ in range(len(self)):
            if self.tput_timer:
                self.tput_timer.start()
            yield next(batches)
