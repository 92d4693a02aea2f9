"""The enums of `engine.offload_states`, and the size from which DeepSpeed moves a tensor to the disk."""

from __future__ import annotations

import enum

from hf_zero.engine.offloaded_states import KINDS

OffloadStateTypeEnum = enum.Enum("OffloadStateTypeEnum", {kind: kind for kind in KINDS}, type=str)  # type: ignore[misc]
OffloadDeviceEnum = enum.Enum("OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str)  # type: ignore[misc]

MIN_SWAPPABLE_BYTES = 1 << 20  # here tensors of any size go there; programs make theirs as large
