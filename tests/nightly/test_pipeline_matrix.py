"""Every combination of stages, schedule, micro-batches, pipelines, ZeRO stage and kind of model, in fp64.

Each is compared with one process: losses, norms and parameters to 1e-9. The 880 trainings of 5 steps take 10 to 17
minutes on 2 cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.pipeline.test_pipeline_parity import check_equal, run_all, settings_for

AT_ONCE = 40


@pytest.fixture(autouse=True)
def _in_fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_pipelines_train_as_one_process_does(world_size: int) -> None:
    settings, wrong = settings_for(world_size), []
    for start in range(0, len(settings), AT_ONCE):
        some = settings[start : start + AT_ONCE]
        by_rank = run_ranks(run_all, world_size, some, timeout=600)
        for setting, outcomes in zip(some, zip(*by_rank, strict=True), strict=True):
            try:
                check_equal(setting, outcomes)
            except AssertionError as error:
                wrong.append(f"{setting}: {error}")
    assert settings and not wrong, "\n".join(wrong)
