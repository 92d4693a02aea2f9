"""Which update an optimizer gets, and which optimizers need whole parameters."""

from __future__ import annotations

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.optim.optimizers.lamb import Lamb
from hf_zero.optim.optimizers.onebit import OneBitAdam
from hf_zero.optim.registry import needs_whole
from hf_zero.optim.updates.elementwise import LambUpdate, OneBitUpdate, TorchUpdate
from hf_zero.optim.updates.owners import Owners
from hf_zero.optim.updates.whole_params import WholeUpdate
from hf_zero.runtime.reduce_schedule import GradReducer

_SPECIAL: dict[type, type[TorchUpdate]] = {Lamb: LambUpdate, OneBitAdam: OneBitUpdate}


def make_owners(optimizer: torch.optim.Optimizer, comm: Comm, *, sharded: bool) -> Owners | None:
    """Deals out the parameters that `optimizer` needs whole; None where it needs none, or has all of them."""
    wants = needs_whole(optimizer)
    return Owners(comm.rank, comm.world_size, comm.device, wants) if sharded and wants is not None else None


def make_update(
    optimizer: torch.optim.Optimizer, reducer: GradReducer, comm: Comm, owners: Owners | None
) -> TorchUpdate:
    """The strategy for `optimizer`."""
    if owners is not None:
        return WholeUpdate(optimizer, reducer, comm, owners)
    kind = next((update for known, update in _SPECIAL.items() if isinstance(optimizer, known)), TorchUpdate)
    return kind(optimizer, reducer, comm)
