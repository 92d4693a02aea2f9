"""The accelerators that the operating system shows, whether torch can use them or not. No torch."""

from __future__ import annotations

import glob
import os

# By the variable that chooses among devices of a kind: the files that their drivers make (NVIDIA's, AMD's, those of
# WSL), and the other variables that choose.
_FILES = {"CUDA_VISIBLE_DEVICES": ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")}
_ALSO_CHOOSE = {"CUDA_VISIBLE_DEVICES": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}


def device_file(kind: str) -> str | None:
    """A file of a device of torch's `kind`; None if there is none, or nobody knows how they are named."""
    found = (path for pattern in _FILES.get(_variable(kind), ()) for path in sorted(glob.glob(pattern)))
    return next(found, None)


def are_hidden(kind: str) -> bool:
    """Whether a variable of the environment says that this process shall see no device of `kind`.

    "" and "-1" say so, and SLURM's NoDevFiles: the list ends at the first name that is none.
    """
    names = (_variable(kind), *_ALSO_CHOOSE.get(_variable(kind), ()))
    chosen = [os.environ[name].strip() for name in names if name in os.environ]
    return any(not value[:1].isdigit() and not value.startswith(("GPU-", "MIG-")) for value in chosen)


def _variable(kind: str) -> str:
    return f"{kind.upper()}_VISIBLE_DEVICES"
