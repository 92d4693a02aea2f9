"""Changes to a configuration that a script makes: where swap files lie, and the same without offload."""

from __future__ import annotations

import copy
import os
from typing import Any

NVME_VARIABLE = "HF_ZERO_NVME_PATH"  # of this recipe
OFFLOADS = ("offload_optimizer", "offload_param")


def choose_nvme_path(given: str | None, output_dir: str) -> str:
    """The folder for swap files: as given, else $HF_ZERO_NVME_PATH, else `swap` in the output folder."""
    return given or os.environ.get(NVME_VARIABLE) or os.path.join(output_dir, "swap")


def with_nvme_path(config: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy of `config` whose blocks with device nvme keep their files in `path`."""
    changed = copy.deepcopy(config)
    for name in OFFLOADS:
        block = changed["zero_optimization"].get(name, {})
        if block.get("device") == "nvme":
            block["nvme_path"] = path
    return changed


def without_offload(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of `config` at stage 2 with nothing offloaded: what an offloaded run is compared with."""
    changed = copy.deepcopy(config)
    zero = changed["zero_optimization"]
    zero["stage"] = 2
    for name in OFFLOADS:
        zero.pop(name, None)
    return changed


def offloads(config: dict[str, Any]) -> bool:
    return any(config["zero_optimization"].get(name, {}).get("device", "none") != "none" for name in OFFLOADS)


def is_delayed(config: dict[str, Any]) -> bool:
    return bool(config["zero_optimization"].get("offload_optimizer", {}).get("delayed_update", False))
