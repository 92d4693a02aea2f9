"""Names what a load cannot carry over one to one although the checkpoint fits; rank 0 logs each line once.

What is trained may change between a save and a resume, and so may precision. A parameter without saved state starts as
a new one in a torch optimizer does, a parameter that is frozen now has no state: right, but not to pass unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_zero.checkpoint.reader import CheckpointReader
from hf_zero.layout import UnitLayout
from hf_zero.sharding.flat_param import FlatParam

_MOST_NAMES = 3


def listed(names: Sequence[str]) -> str:
    """Count the parameters, and name the first few."""
    more = ", ..." if len(names) > _MOST_NAMES else ""
    noun = "parameter" if len(names) == 1 else "parameters"
    return f"{len(names)} {noun} ({', '.join(names[:_MOST_NAMES])}{more})"


def of_names(reader: CheckpointReader, layouts: Sequence[UnitLayout]) -> list[str]:
    """Name parameters that only the model or only the checkpoint has; strict=False goes on without them."""
    mine = [slot.name for layout in layouts for slot in layout.slots]
    found = []
    if new := [name for name in mine if not reader.holds(name)]:
        found.append(f"it does not hold {listed(new)} of the model: they stay as they are, without optimizer state")
    if unknown := reader.names_beside(mine):
        found.append(f"the model does not have {listed(unknown)} of the checkpoint: they are left out")
    return found


def of_weights(reader: CheckpointReader, flats: Sequence[FlatParam]) -> list[str]:
    """Name master weights that were saved in a wider type than this run keeps them in."""
    rounded = []
    for flat in (flat for flat in flats if flat.master is not None):
        for slot in flat.layout.slots:
            stored = reader.weight_dtype(slot.name) if reader.holds(slot.name) else None
            if stored is not None and torch.promote_types(stored, flat.best.dtype) != flat.best.dtype:
                rounded.append(slot.name)
    if not rounded:
        return []
    return [f"the saved values of {listed(rounded)} are rounded: this run trains them in a shorter type"]


def of_optimizer_state(reader: CheckpointReader, layouts: Sequence[UnitLayout]) -> list[str]:
    """Name parameters whose state starts anew or is left out, because something else is trained now."""
    manifest = reader.manifest
    if manifest.optimizer is None:
        return ["it was saved without an optimizer: optimizer state and hyperparameters start anew"]
    then = [slot.name for layout in manifest.layouts if layout.trainable for slot in layout.slots]
    now = [slot.name for layout in layouts if layout.trainable for slot in layout.slots]
    kept = {manifest.tied.get(name, name) for name in now}
    found = []
    if new := [name for name in now if reader.holds(name) and manifest.tied.get(name, name) not in then]:
        found.append(f"{listed(new)} were not trained when it was saved: their optimizer state starts anew")
    beside = set(reader.names_beside(slot.name for layout in layouts for slot in layout.slots))
    if gone := [name for name in then if name not in kept and name not in beside]:
        found.append(f"{listed(gone)} were trained when it was saved and are not now: their state is left out")
    return found
