"""A user of an accelerator can get these wrong: one sentence on every rank, with what to do. On the lag device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from tests.harness.ranks import RankFailure, run_ranks
from tests.lag import device, group
from tests.lag.test_training import STAGES, Layers, _config

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def start(stage: str = "stage 2", **keys: Any) -> Any:
    config = {**_config(STAGES[stage], 1), **keys}
    return hf_zero.initialize(model=Layers().to("lag"), config=config)[0]


def start_on_lag() -> None:
    device.enable()
    group.register()
    start()


def said_by(failures: list[Any], kind: str) -> list[str]:
    for failure in failures:
        assert isinstance(failure, RankFailure) and failure.kind == kind, failure
    return [failure.message for failure in failures]


def test_more_ranks_than_devices() -> None:
    failures = run_ranks(start_on_lag, 3, expect_error=True, env={"LAG_DEVICES": "2"})
    for rank, said in enumerate(said_by(failures, "ConfigError")):
        assert said.startswith(f"rank {rank}: ranks [0, 2] are all on one device"), said
        assert "of 2 that it sees" in said and "torchrun --nproc_per_node 2" in said


def test_two_ranks_on_one_device() -> None:
    """Two ranks share a device where a starter sets no local rank for each."""
    failures = run_ranks(start_on_lag, 2, expect_error=True, env={"LOCAL_RANK": "0"})
    for rank, said in enumerate(said_by(failures, "ConfigError")):
        assert said.startswith(f"rank {rank}: ranks [0, 1] are all on one device"), said


def recorded() -> list[str]:
    """A forward while a graph is recorded, as torch.cuda.graph does: before and after that all is well."""
    from tests.lag import torch_lag

    device.enable()
    group.register()
    capturing: list[bool] = []
    torch_lag.is_current_stream_capturing = lambda: bool(capturing)  # type: ignore[attr-defined]
    said = []
    for stage in ("stage 0", "stage 3"):
        engine = start(stage)
        ids = torch.zeros(2, 5, dtype=torch.long, device=engine.device)
        for recording in (False, True, False):
            capturing[:] = [True] * recording
            try:
                with torch.no_grad():
                    engine(ids, ids)
            except hf_zero.StateError as error:
                said.append(str(error))
            else:
                said.append("")
        engine.teardown()
    return said


def test_a_forward_inside_a_recorded_graph() -> None:
    for rank, said in enumerate(run_ranks(recorded, 2)):
        assert [bool(text) for text in said] == [False, True, False] * 2
        assert said[1].startswith(f"rank {rank}: a CUDA graph is being recorded") and "teardown" in said[1]


def start_without_bf16() -> None:
    from tests.lag import torch_lag

    device.enable()
    group.register()
    torch_lag.is_bf16_supported = lambda: False  # type: ignore[assignment]
    start()  # in fp32
    start(bf16={"enabled": True})


def test_a_device_without_bf16() -> None:
    for said in said_by(run_ranks(start_without_bf16, 2, expect_error=True), "ConfigError"):
        assert "cannot compute in torch.bfloat16" in said and "fp16" in said
