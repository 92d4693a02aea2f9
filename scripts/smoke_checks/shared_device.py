"""Two ranks on one device, which NCCL refuses: for this run only, through the host."""

from __future__ import annotations

from collections.abc import Iterator

import hf_zero
from hf_zero.distributed import comm
from smoke_checks import host_group, over_ranks
from smoke_checks.rows import Row
from smoke_checks.training import Task


def check(task: Task, device: str) -> Iterator[Row]:
    """Check over_ranks on one device; every rank yields the rows."""
    host_group.register()
    # This run is to show what is refused otherwise.
    comm.refuse_shared_device = lambda device: None  # type: ignore[assignment]
    hf_zero.init_distributed()
    for row in over_ranks.check(task, device, 2):
        yield Row(row.what.replace("2 ranks", "2 ranks on one device"), row.status, row.detail)
