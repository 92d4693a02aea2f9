"""Which accelerators the operating system shows, whether torch can use them or not. No torch."""

from __future__ import annotations

import glob
import os

# What a driver makes for the devices of a kind, by torch's name for it: NVIDIA's, AMD's, those of WSL.
_FILES = {"cuda": ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")}
_CHOICES = {"cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}


def device_file(kind: str) -> str | None:
    """A file of a device of torch's `kind`; None if there is none, or nobody knows how they are named."""
    found = (path for pattern in _FILES.get(kind, ()) for path in sorted(glob.glob(pattern)))
    return next(found, None)


def are_hidden(kind: str) -> bool:
    """Whether a variable of the environment says that this process shall see no device of `kind`.

    "" and "-1" say so, and SLURM's NoDevFiles: the list ends at the first name that is none.
    """
    chosen = [os.environ[name].strip() for name in _CHOICES.get(kind, ()) if name in os.environ]
    return any(not value[:1].isdigit() and not value.startswith(("GPU-", "MIG-")) for value in chosen)
