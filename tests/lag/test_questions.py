"""Commands, plans and scripts get answers from a device that is not CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.extras.deepspeed.accelerator import Accelerator
from hf_zero.extras.estimate.account import account
from hf_zero.native.devices import visible_devices
from tests.harness.ranks import run_ranks
from tests.lag import device, group
from tests.lag.test_pinning import config_of, trained

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))

_MEMORY = 1 << 30


def _answers() -> dict[str, Any]:
    device.enable()
    group.register()
    device.set_memory_limit(_MEMORY)
    held = torch.zeros(1 << 20, device="lag")
    accelerator = Accelerator()
    engine = trained(config_of({"stage": 2}, {}))
    return {
        "devices": [(one.name, one.memory_bytes) for one in visible_devices()],
        "count": torch.accelerator.device_count(),
        "total": accelerator.total_memory(),
        "allocated": accelerator.memory_allocated() >= held.nbytes,
        "peak": account(engine)[-1],
    }


def test_memory_is_that_of_the_device() -> None:
    device.build()
    (answers,) = run_ranks(_answers, 1)
    assert answers["devices"] == [(f"lag:{index}", _MEMORY) for index in range(answers["count"])]
    assert answers["total"] == _MEMORY
    assert answers["allocated"]
    assert "torch.accelerator.max_memory_allocated" in answers["peak"]
    megabytes = float(answers["peak"].split()[1])
    assert 4 < megabytes < 100, "4 MiB are held, and a process alone has more than 100"
