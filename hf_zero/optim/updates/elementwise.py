"""The strategies that run a torch optimizer over the elements that this rank updates: one per kind of optimizer.

Most optimizers treat every element by itself and are simply called. Others need more than a shard: Lamb the norms of
unsharded parameters, OneBitAdam gradients that no rank has averaged, some the unsharded parameters (whole_params.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from hf_zero.layout import Piece, Slice
from hf_zero.optim.optimizers.lamb import Lamb
from hf_zero.optim.optimizers.onebit import OneBitAdam
from hf_zero.optim.param_groups import OwnedSlice
from hf_zero.optim.registry import needs_unsharded
from hf_zero.optim.updates.compressed_mean import SignMean
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.sharding.param_index import ParamPlace

# A parameter's name, elements of it, and tensors that hold these
StatePlace = tuple[str, Slice | Sequence[Piece], Sequence[torch.Tensor]]
# Maps a kind to the full state of one parameter, None before the first update; all ranks must call.
StateReader = Callable[[str], torch.Tensor | None]
HasGrad = Mapping[GradAccumulator, Sequence[bool]]  # per parameter: whether any rank had a gradient


@dataclass(frozen=True)
class FileState:
    """Optimizer state of parameters that are updated unsharded, in the form in which checkpoints hold it."""

    # By name, for each tensor of this rank's slice: what has the parameter's shape, sharded like it; and numbers.
    parts: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    # Tensors of other shapes by name and kind, in full, on all ranks.
    odd: Mapping[tuple[str, str], torch.Tensor] = field(default_factory=dict)


class TorchUpdate:
    """The update of an optimizer that treats every element by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: GradReducer, comm: Comm) -> None:
        self.optimizer = optimizer
        self.reducer = reducer
        self.comm = comm
        for acc in reducer.accumulators:  # another optimizer may have kept gradients on their ranks
            acc.stay_local(False)

    def update(self, owned: Sequence[OwnedSlice], has_grad: HasGrad) -> None:
        """One update of the masters from the mean gradient. All ranks must call.

        Called without any gradient too: it runs the user's step hooks, and schedulers look for the call.
        """
        for group in sub_groups(self.optimizer, owned, has_grad):
            give_gradients(group)
            self.call(owned)
            drop_gradients(group)

    def call(self, owned: Sequence[OwnedSlice]) -> None:
        """Let the optimizer take its step."""
        self.optimizer.step()

    def restart(self) -> None:
        """The optimizer's state has been replaced, by a checkpoint's."""

    def state_bytes(self) -> int:
        """Bytes held between steps beside what the optimizer itself holds."""
        return 0

    def file_state(self, owned: Sequence[OwnedSlice]) -> FileState:
        """The state that is not where the masters are, or not of their shape. All ranks must call."""
        if needs_unsharded(self.optimizer) is None:
            return FileState()
        # Every rank has full parameters.
        states = {one.slice.name: (one, self.optimizer.state.get(one.masters[0], {})) for one in owned}
        return FileState(
            {},
            {
                (name, kind): value
                for name, (one, state) in states.items()
                for kind, value in state.items()
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != one.masters[0].shape
            },
        )

    def places(self, owned: Sequence[OwnedSlice]) -> Iterator[StatePlace]:
        """The tensors that the optimizer holds on this rank, and of which elements of which parameter."""
        yield from ((one.slice.name, one.slice, one.masters) for one in owned if not one.native)

    def reader_of(self, place: ParamPlace) -> StateReader | None:
        """The reader of the state of a parameter that is not where its master is; None for others."""
        return None

    def check_sharded(self, place: ParamPlace) -> None:
        """Raise StateError if the state of a parameter cannot be read and set in part."""
        if self.reader_of(place) is not None:
            raise StateError(
                f"the state of {place.slot.name} is on one rank: {type(self.optimizer).__name__} "
                "needs it so. It can be read in full, by full_optimizer_state, and not be set."
            )


def give_gradients(owned: Sequence[OwnedSlice]) -> None:
    """Give the tensors that an optimizer holds for slices their gradients."""
    for one in owned:
        for master, grad in zip(one.masters, one.gradients(), strict=False):
            master.grad = grad


def drop_gradients(owned: Sequence[OwnedSlice]) -> None:
    """Undo `give_gradients`."""
    for one in owned:
        for master in one.masters:
            master.grad = None


def sub_groups(
    optimizer: torch.optim.Optimizer, owned: Sequence[OwnedSlice], has_grad: HasGrad
) -> list[list[OwnedSlice]]:
    """The slices that a torch optimizer updates, in groups of at most `sub_group_size` elements; larger ones go alone.

    torch's foreach updates make several temporaries as large as everything that one call updates, and leave tensors
    without a gradient alone: called once per group, they make them as large as a group. As in DeepSpeed, the user's
    step hooks run once per call.

    There is always a group, perhaps an empty one: the optimizer is called in every step. Other optimizers than torch's
    get everything in one: they may count their calls, or look at all tensors together.

    Args:
        has_grad: By gradient accumulator: whether each of its parameters had a gradient on any rank.
    """
    present = [slice_ for slice_ in owned if has_grad[slice_.acc][slice_.index] and not slice_.native]
    if not type(optimizer).__module__.startswith("torch.optim."):
        return [present]
    groups: list[list[OwnedSlice]] = [[]]
    size = 0
    for slice_ in present:
        numel = slice_.slice.numel
        if groups[-1] and size + numel > slice_.acc.flat.placement.sub_group_numel:
            groups.append([])
            size = 0
        groups[-1].append(slice_)
        size += numel
    return groups


class LambUpdate(TorchUpdate):
    """Lamb on shards: squared norms per parameter, summed over the ranks by one all-reduce."""

    optimizer: Lamb

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: GradReducer, comm: Comm) -> None:
        super().__init__(optimizer, reducer, comm)
        self._numbers: list[int] = []  # of the parameters that the tensors of the last update belong to
        self._index = torch.empty(0, dtype=torch.long, device="cpu")  # the same, where the norms are

    def call(self, owned: Sequence[OwnedSlice]) -> None:
        firsts, total = {}, 0
        for acc in self.reducer.accumulators:
            firsts[acc] = total
            total += len(acc.flat.params)
        places = {master: firsts[one.acc] + one.index for one in owned for master in one.masters}
        sharded = any(acc.flat.layout.world_size > 1 for acc in self.reducer.accumulators)

        def combine(tensors: Sequence[torch.Tensor], squares: torch.Tensor) -> torch.Tensor:
            full = self._zeros(total)
            index = self._index_of([places[tensor] for tensor in tensors], full.device)
            if tensors and (not sharded or self.comm.rank < self.comm.num_shards):  # else others add the same
                full.index_add_(0, index, squares.to(full.dtype))
            if sharded:
                full = self._sum_over_ranks(full)
            return full[index] if tensors else squares

        self.optimizer.step(combine=combine)

    def _zeros(self, total: int) -> torch.Tensor:
        """[total, 2], where the masters are: the same on all ranks, as a rank may own none."""
        accumulators = self.reducer.accumulators
        if self.comm.computes_on_host or not any(acc.flat.placement.master.is_on_device for acc in accumulators):
            return torch.zeros(total, 2, dtype=torch.float64, device="cpu")
        types = {acc.flat.master_dtype for acc in accumulators}
        dtype = torch.float64 if torch.float64 in types else torch.float32  # not every device has fp64
        return torch.zeros(total, 2, dtype=dtype, device=self.comm.device)

    def _index_of(self, numbers: list[int], device: torch.device) -> torch.Tensor:
        """The index; a new one, whose copy makes the host wait, if other parameters have gradients than before."""
        if numbers != self._numbers or device != self._index.device:
            self._numbers, self._index = numbers, torch.tensor(numbers, dtype=torch.long, device=device)
        return self._index

    def _sum_over_ranks(self, full: torch.Tensor) -> torch.Tensor:
        what = "norms of parameters"
        if full.device == self.comm.device:
            self.comm.all_reduce(full, what).wait()
            return full
        # On the host beside a device whose backend takes nothing of the host's.
        return self.comm.vote(full.view(-1), what).view_as(full)


class OneBitUpdate(TorchUpdate):
    """OneBitAdam: once its variance is frozen, ranks keep their gradients and exchange signs of momenta."""

    optimizer: OneBitAdam

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: GradReducer, comm: Comm) -> None:
        super().__init__(optimizer, reducer, comm)
        self._mean = SignMean(comm)
        self._choose_phase()

    def call(self, owned: Sequence[OwnedSlice]) -> None:
        self.optimizer.step(exchange=self._mean.average if self.comm.world_size > 1 else None)
        self._choose_phase()

    def restart(self) -> None:
        self._mean.reset()
        self._choose_phase()

    def state_bytes(self) -> int:
        return self._mean.nbytes

    def _choose_phase(self) -> None:
        frozen = self.optimizer.is_frozen
        for acc in self.reducer.accumulators:
            acc.stay_local(frozen)
