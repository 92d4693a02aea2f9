"""Arithmetic alone says which sizes of the configuration cut a flat parameter. See [Note: Whole units] in
unit_specs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.extras.estimate.pretend import PretendedComm
from hf_zero.runtime.unit_specs import BuildSettings, flat_param_specs

WIDTH = 4096  # "auto" is its square
NUMEL = 3 * WIDTH * WIDTH
BF16_ON_THE_WIRE = {"communication_data_type": "bf16"}


class Model(nn.Module):
    """A matrix that trains, and a frozen one of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.frozen = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.frozen.requires_grad_(False)


def buckets(zero: dict[str, Any], *, on_host: bool = False, **more: Any) -> dict[str, int]:
    """Return for the trainable and for the frozen flat parameter: elements of a bucket."""
    with torch.device("meta"):
        model = Model()
    config = ZeroConfig.load({"zero_optimization": {"stage": 2, **zero}, **more}).resolve(model=model, world_size=4)
    comm = PretendedComm(0, 4, on_host=on_host)
    specs = [spec for _, mine in flat_param_specs(model, BuildSettings.of(config), comm) for spec in mine]
    return {"trained" if spec.layout.trainable else "frozen": spec.layout.bucket_numel for spec in specs}


WHOLE = {"trained": NUMEL, "frozen": NUMEL}


@pytest.mark.parametrize("more", [{}, BF16_ON_THE_WIRE], ids=["", "bf16 on the wire"])
@pytest.mark.parametrize("zero", [{}, {"reduce_bucket_size": "auto"}, {"allgather_bucket_size": "auto"}], ids=str)
def test_auto_and_default_cut_nothing_on_devices(zero: dict[str, Any], more: dict[str, Any]) -> None:
    assert buckets(zero, **more) == WHOLE


def test_a_number_bounds_the_copies_of_a_reduce_on_devices() -> None:
    small, eighth = {"reduce_bucket_size": NUMEL // 8 - 8}, {"reduce_bucket_size": NUMEL // 8}
    assert buckets(small, **BF16_ON_THE_WIRE) == {"trained": small["reduce_bucket_size"] // 32 * 32, "frozen": NUMEL}
    assert buckets(small) == WHOLE, "gradients travel as they are: nothing is copied"
    assert buckets(small, communication_data_type="fp32") == WHOLE
    assert buckets(eighth, **BF16_ON_THE_WIRE) == WHOLE, "all eight would be under way at once"
    assert buckets({"allgather_bucket_size": 1000}, **BF16_ON_THE_WIRE) == WHOLE, "gathers copy nothing"


def test_the_smaller_size_holds_on_gloo() -> None:
    assert buckets({}, on_host=True) == {"trained": 1 << 20, "frozen": 1 << 20}
    assert buckets({"reduce_bucket_size": 1000}, on_host=True) == {"trained": 992, "frozen": 992}
    assert buckets({"allgather_bucket_size": 1000}, on_host=True) == {"trained": 992, "frozen": 992}
    assert buckets({"reduce_bucket_size": "auto"}, on_host=True) == {"trained": 1 << 20, "frozen": 1 << 20}
