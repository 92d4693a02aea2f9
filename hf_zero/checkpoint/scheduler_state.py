"""A scheduler's state in the manifest: JSON on the way out, the kinds of value that the scheduler keeps on the way in.

JSON has neither tuples nor keys that are numbers: MultiStepLR, which counts its milestones by epoch, would pass over
all of them. So what is loaded takes its kinds from the state that the scheduler has.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_zero.checkpoint.format import SaveInfo
from hf_zero.errors import CheckpointError

_REMEDY = "Use the same scheduler over the same parameter groups, or load with load_lr_scheduler_states=False"


def plain(value: Any) -> Any:
    """JSON for what optimizers and schedulers keep; other objects (lambdas of a scheduler) are left out as None."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else None


def state_for(scheduler: Any, saved: SaveInfo) -> dict[str, Any] | None:
    """The saved state as `scheduler.load_state_dict` takes it; None where none was saved.

    Raises:
        CheckpointError: It is that of another scheduler.
    """
    if scheduler is None or saved.lr_scheduler is None:
        return None
    its, mine = saved.lr_scheduler_class, type(scheduler).__name__
    if its not in (None, mine):
        raise CheckpointError(
            f"the checkpoint holds the state of {its}, this run's schedule is {mine}: use the same, or load "
            "with load_lr_scheduler_states=False"
        )
    state = dict(scheduler.state_dict())
    for key, value in saved.lr_scheduler.items():
        if value is not None:
            state[key] = like(state.get(key), value, f"{mine}.{key}", _REMEDY)
    return state


def like(own: Any, saved: Any, where: str, remedy: str) -> Any:
    """`saved`, which comes from JSON, in the kind that `own` has.

    Raises:
        CheckpointError: It is of another kind; the message names `where`, and the remedy.
    """
    if own is None or saved is None:
        return saved
    if isinstance(own, torch.Tensor) and own.dim() == 0:
        if isinstance(saved, int | float):
            return torch.tensor(saved, dtype=own.dtype, device=own.device)
    elif isinstance(own, dict) and isinstance(saved, dict):
        numbered = bool(own) and all(isinstance(key, int) for key in own)
        keys = {key: int(key) if numbered and key.lstrip("-").isdecimal() else key for key in saved}
        return type(own)({keys[key]: like(own.get(keys[key]), value, where, remedy) for key, value in saved.items()})
    elif isinstance(own, list | tuple) and isinstance(saved, list):
        if len(own) == len(saved):
            return type(own)(like(one, value, where, remedy) for one, value in zip(own, saved, strict=True))
    elif isinstance(own, str | bool) or isinstance(saved, bool):
        if type(own) is type(saved):
            return saved
    elif isinstance(own, int | float) == isinstance(saved, int | float):
        return saved
    raise CheckpointError(
        f"{where} is {own!r} in this run, and {saved!r} in the checkpoint: expected a value of the same kind. {remedy}"
    )
