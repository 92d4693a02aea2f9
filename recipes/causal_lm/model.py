"""Finds the model of this recipe: the packaged one, a folder or a hub id, whole or only its first layers.

Models that have to be made first (the packaged weights come in another format; a model cut to its first layers exists
nowhere) are made once, by prepare.py, and kept in a cache folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

PACKAGED = "smollm2-135m"
CLONE = Path(__file__).resolve().parents[2]


def cache_dir() -> Path:
    """The folder of prepared models: $HF_ZERO_CACHE, else ~/.cache/hf_zero."""
    return Path(os.environ.get("HF_ZERO_CACHE") or Path.home() / ".cache" / "hf_zero").absolute()


def prepared_path(name: str, layers: int | None) -> Path | None:
    """The folder of the prepared model, which may not be there yet; None for a model that is used as it is."""
    if name != PACKAGED and layers is None:
        return None
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
    return cache_dir() / "models" / (slug if layers is None else f"{slug}-{layers}-layers")


def resolve_model(name: str = PACKAGED, layers: int | None = None) -> str:
    """Return what `from_pretrained` is to load. Makes the model first where that is needed and was not done before.

    Any number of ranks may call it at once: one of them makes the model, the others wait for it.

    Args:
        name: PACKAGED, a folder, or a hub id.
        layers: Keep the first `layers` decoder layers only. Embeddings, head and tokenizer stay whole.
    """
    path = prepared_path(name, layers)
    if path is None:
        return name
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.is_dir():
                _prepare_in_own_process(name, layers)
    return str(path)


def _prepare_in_own_process(name: str, layers: int | None) -> None:
    # Not in this process: with an active ZeRO configuration `from_pretrained` is a collective call here, while only
    # the rank that holds the lock prepares.
    command = [sys.executable, "-m", "recipes.causal_lm.prepare", "--model", name]
    if layers is not None:
        command += ["--layers", str(layers)]
    alone = {key: value for key, value in os.environ.items() if key not in _LAUNCHER_VARIABLES}
    done = subprocess.run(command, cwd=CLONE, env={**alone, "HF_ZERO_CACHE": str(cache_dir())}, check=False)
    if done.returncode != 0:
        raise SystemExit(f"The model {name!r} could not be prepared (see above). Try again: {' '.join(command)}")


_LAUNCHER_VARIABLES = frozenset(
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HF_ZERO_CONFIG"]
)
