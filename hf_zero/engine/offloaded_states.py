"""Training states that wait on the host while something else needs the device: a generation, an inference engine.

DeepSpeed's `engine.offload_states` and `reload_states`. The memory of a state is freed by a storage of 0 bytes, so all
tensors that share it stay what they are, and have their values again when it is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hf_zero.errors import ConfigError, StateError
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.sharding.placement import Placements
from hf_zero.sharding.shard import Shard, ShardTensor
from hf_zero.sharding.unit import ShardUnit

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
_GRADIENTS = ("lp_grads", "contiguous_grad_buffer")  # one memory here


@dataclass(frozen=True)
class _Freed:
    """The memory of a tensor that is on the host."""

    storage: torch.UntypedStorage
    key: str
    nbytes: int


def kinds_of(include: Iterable[object] | None) -> tuple[str, ...]:
    """Return the kinds by their names; None is all of them.

    Raises:
        ConfigError: A name is unknown.
    """
    names = KINDS if include is None else tuple(str(getattr(kind, "value", kind)) for kind in include)
    if unknown := [name for name in names if name not in KINDS]:
        raise ConfigError(f"offload_states(include=...): unknown {unknown[0]!r}; expected some of {', '.join(KINDS)}")
    return names


class OffloadedStates:
    """The states of one engine that are on the host, and the way there and back.

    Parameters that are not sharded between uses stay on the device, and so do masters that share their memory (fp32
    at stages 0-2). What `offload_optimizer` and `offload_param` keep on the host or a disk is there already.
    """

    def __init__(
        self,
        units: Sequence[ShardUnit],
        reducer: GradReducer,
        optimizer: ShardedOptimizer,
        placements: Placements,
        *,
        pin: bool,
    ) -> None:
        """`pin`: the memory on the host is pinned. Raises StateError where masters and moments have 8 and 16 bits."""
        if any(flat.placement.scaled for unit in units for flat in unit.flats):
            raise StateError('offload_states is not possible with msamp O2 and O3: set msamp.opt_level to "O1"')
        self._units = units
        self._reducer = reducer
        self._optimizer = optimizer
        self._placements = placements
        self._host = placements.lend_host(pin=pin)
        self._freed: list[_Freed] = []
        self._shards: list[ShardTensor] = []

    def offload(self, kinds: Sequence[str]) -> None:
        """Move what is on the device to the host; what is there already stays. No communication."""
        self._optimizer.away = "while states are on the host: call engine.reload_states() first"
        for flat in (flat for unit in self._units for flat in unit.flats if "lp_params" in kinds):
            flat.drop_row()  # the first gather after `reload` fills another one
        for kind in kinds:
            shards = list(self._shards_of(kind))
            for shard in shards:
                self._free(shard.memory)
                shard.is_away = True
            self._shards += shards
            for state in self._optimizer.state_tensors() if kind == "optim_states" else ():
                if state.device == self._host.device:
                    self._free(state)
        torch.accelerator.synchronize(self._host.device)
        torch.accelerator.empty_cache()

    def _free(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if not nbytes:  # another tensor that shares it came before
            return
        key = f"away/{len(self._freed)}"
        self._host.create(key, nbytes, torch.uint8)
        self._host.tensor(key).copy_(_bytes_of(storage), non_blocking=True)
        self._freed.append(_Freed(storage, key, nbytes))
        storage.resize_(0)  # whoever gets the memory next writes to it after the copy, on the same stream

    def reload(self) -> None:
        """Move everything back, for good. No communication."""
        for freed in self._freed:
            freed.storage.resize_(freed.nbytes)
            _bytes_of(freed.storage).copy_(self._host.tensor(freed.key), non_blocking=True)
        torch.accelerator.synchronize(self._host.device)
        self._placements.take_back(self._host)
        for shard in self._shards:
            shard.is_away = False
        self._optimizer.away = ""

    def _shards_of(self, kind: str) -> Iterator[ShardTensor]:
        """The shards of a kind that are on the device, as memory of their own.

        fp32 weights that are their own master are lp_params.
        """
        found: list[Shard | None] = []
        flats = [flat for unit in self._units for flat in unit.flats]
        if kind == "lp_params":
            found = [flat.shard for flat in flats if flat.on_demand]
        elif kind == "hp_params":
            found = [flat.own_master for flat in flats]
        elif kind in _GRADIENTS:
            found = [acc.shard for acc in self._reducer.accumulators]
        elif kind == "optim_states":
            found = [one for shards in self._optimizer.attached.values() for one in shards.values()]
        for shard in found:
            if isinstance(shard, ShardTensor) and not shard.is_away and shard.memory.device == self._host.device:
                yield shard


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
