"""Tests of what is kept of unsharded parameters, on a device whose freed memory is poisoned and whose streams are
late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.lag import device, group
from tests.runtime import test_memory_owners as owners

pytestmark = pytest.mark.skipif(device.reason_to_skip() is not None, reason=str(device.reason_to_skip()))
KEEPERS = [keep for keep in owners.KEEPERS if keep is not owners.keep_array]  # an array is on the host


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    device.build()


def on_the_device(work: Callable[..., Any], *args: Any) -> None:
    device.enable()
    group.register()
    with torch.device(device.NAME):
        work(*args)


@pytest.mark.parametrize("keep", KEEPERS)
def test_what_a_hook_keeps_of_a_weight_stays_as_it_was(keep: Callable[..., Any]) -> None:
    run_ranks(on_the_device, 2, owners.out_of_a_pass, keep, {})


def test_what_is_kept_of_edits_and_between_the_passes() -> None:
    run_ranks(on_the_device, 2, owners.by_name_and_written, {})
    run_ranks(on_the_device, 2, owners.between_forward_and_backward)
