"""The enums of `engine.offload_states`: deepspeed.runtime.zero.offload_config's names."""

from __future__ import annotations

import enum

from hf_zero.engine.offloaded_states import KINDS

OffloadStateTypeEnum = enum.Enum("OffloadStateTypeEnum", {kind: kind for kind in KINDS}, type=str)  # type: ignore[misc]
OffloadDeviceEnum = enum.Enum("OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str)  # type: ignore[misc]
