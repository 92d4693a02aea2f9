"""The media on which parameters and optimizer states are kept, by their names in a configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Medium:
    """One value of `offload_param.device` and `offload_optimizer.device`."""

    is_device: bool = False  # the memory of the device that computes: nothing is offloaded
    is_host: bool = False  # the host's memory
    needs_folder: bool = False  # files below `nvme_path`


MEDIA = {"none": Medium(is_device=True), "cpu": Medium(is_host=True), "nvme": Medium(needs_folder=True)}
