"""The accelerators that the operating system shows, whether torch can use them or not. No torch."""

from __future__ import annotations

import glob
import os

# The variables that say which devices a process sees, for accelerators that ignore CUDA_VISIBLE_DEVICES.
_VISIBLE = {
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "hpu": "HABANA_VISIBLE_MODULES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
}
# Drivers make these files (NVIDIA's, AMD's, those of WSL), and some devices are chosen by more variables than one.
_FILES = {"CUDA_VISIBLE_DEVICES": ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")}
_ALSO_CHOOSE = {"CUDA_VISIBLE_DEVICES": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}


def visible_devices_variable(kind: str) -> str:
    """The environment variable that chooses among devices of torch's `kind`."""
    return _VISIBLE.get(kind, f"{kind.upper()}_VISIBLE_DEVICES")


def choosing_variables(kind: str) -> tuple[str, ...]:
    """All variables of the environment that choose among devices of torch's `kind`."""
    variable = visible_devices_variable(kind)
    return (variable, *_ALSO_CHOOSE.get(variable, ()))


def device_file(kind: str) -> str | None:
    """A file of a device of torch's `kind`; None if there is none, or nobody knows how they are named."""
    found = (path for pattern in _FILES.get(visible_devices_variable(kind), ()) for path in sorted(glob.glob(pattern)))
    return next(found, None)


def are_hidden(kind: str) -> bool:
    """Whether a variable of the environment says that this process shall see no device of `kind`.

    "" and "-1" say so, and SLURM's NoDevFiles: the list ends at the first name that is none.
    """
    chosen = [os.environ[name].strip() for name in choosing_variables(kind) if name in os.environ]
    return any(not value[:1].isdigit() and not value.startswith(("GPU-", "MIG-")) for value in chosen)
