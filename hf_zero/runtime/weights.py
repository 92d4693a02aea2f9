"""Whole weights out of a sharded model and back, one unit at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from hf_zero.comm import Comm
from hf_zero.errors import CheckpointError, StateError
from hf_zero.runtime.params import OnDemandParams
from hf_zero.shards.partition import clean_name, tied_names
from hf_zero.shards.unit import ShardUnit, UnitState


def own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers in state_dict order, under plain names."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{clean_name(path)}." if clean_name(path) else ""
        for name, param in module._parameters.items():
            if param is not None:
                yield prefix + name, param
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


class WholeWeights:
    """Reads and writes the weights of one engine's model as whole tensors."""

    def __init__(
        self,
        model: nn.Module,
        units: list[ShardUnit],
        params: OnDemandParams,
        comm: Comm,
        before_write: Callable[[], None],
    ) -> None:
        self._model = model
        self._units = units
        self._params = params
        self._comm = comm
        self._before_write = before_write  # nothing may write to the masters beside an edit

    @contextlib.contextmanager
    def gathered(self, units: Iterable[ShardUnit], write_rank: int | None = None) -> Iterator[None]:
        """Make `units` whole inside the block; with `write_rank`, that rank's edits are kept. All ranks must call."""
        units = list(units)
        if write_rank is not None:
            self._before_write()
        mine = [unit for unit in units if unit.state is not UnitState.FULL]
        if write_rank is not None and len(mine) < sum(unit.on_demand for unit in units):
            raise StateError(
                "parameters cannot be written between forward and backward, or inside another gathered_params: units "
                "are in use. Write before the forward or after engine.step()."
            )
        with torch.no_grad():
            for unit in mine:
                self._params.make_full(unit)
        try:
            yield
            if write_rank is not None:
                self._keep_edits(units, write_rank)
        finally:
            for unit in mine:
                self._params.make_sharded(unit)

    def _keep_edits(self, units: Iterable[ShardUnit], write_rank: int) -> None:
        with torch.no_grad():
            for unit in units:
                for buffer in unit.buffers:
                    for start, numel in buffer.layout.buckets():
                        bucket = buffer.full[start : start + numel]
                        self._comm.broadcast(bucket, f"edits of {buffer.layout.name}", src=write_rank)
                    buffer.accept_whole()

    def state_dict(self, keep: bool, *, trainable_only: bool) -> dict[str, torch.Tensor]:
        """See ZeroEngine.full_state_dict."""
        whole: dict[str, torch.Tensor] = {}
        for unit in self._units:
            with self.gathered([unit]):
                for buffer in unit.buffers:
                    if keep and (buffer.layout.trainable or not trainable_only):
                        for slot, param in zip(buffer.layout.slots, buffer.params, strict=True):
                            whole[slot.name] = param.detach().to("cpu", copy=True)
        if not keep:
            return {}
        aliases = tied_names(self._model)
        ordered: dict[str, torch.Tensor] = {}
        for name, tensor in own_tensors(self._model):
            if aliases.get(name, name) in whole:
                ordered[name] = whole[aliases.get(name, name)]
            elif not isinstance(tensor, nn.Parameter) and not trainable_only:
                ordered[name] = tensor.detach().to("cpu", copy=True)
        return ordered

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
        """See ZeroEngine.load_full_state_dict."""
        names = tied_names(self._model)
        own = dict(own_tensors(self._model))
        wanted = {names.get(name, name): tensor for name, tensor in own.items()}
        given = {names.get(clean_name(name), clean_name(name)): name for name in state}
        problems = [f"missing: {name}" for name in wanted if name not in given]
        problems += [f"not in the model: {name}" for name in given if name not in wanted]
        if strict and problems:
            raise CheckpointError(
                f"rank {self._comm.rank}: the weights do not fit the model:\n  " + "\n  ".join(problems)
            )
        shapes = [
            f"{name}: {tuple(state[given[name]].shape)} in the file, {tuple(tensor.shape)} in the model"
            for name, tensor in wanted.items()
            if name in given and state[given[name]].shape != tensor.shape
        ]
        if shapes:
            raise CheckpointError(f"rank {self._comm.rank}: shapes differ:\n  " + "\n  ".join(shapes))
        with torch.no_grad():
            for unit in self._units:
                self._params.make_sharded(unit)
                mine = {slot.name for buffer in unit.buffers for slot in buffer.layout.slots}
                self._load_unit(unit, {name: state[given[name]] for name in mine & given.keys()})
            for name, tensor in wanted.items():
                if not isinstance(tensor, nn.Parameter) and name in given:
                    tensor.copy_(state[given[name]])

    def _load_unit(self, unit: ShardUnit, state: Mapping[str, torch.Tensor]) -> None:
        for buffer in unit.buffers:
            targets = list(buffer.owned().values())
            for run in buffer.layout.runs(buffer.rank):
                if run.name in state:
                    flat = state[run.name].reshape(-1)
                    for target in targets:
                        target.write_run(run, torch.cat([flat[piece.start : piece.end] for piece in run.pieces]))
            if not buffer.on_demand:
                for slot, param in zip(buffer.layout.slots, buffer.params, strict=True):
                    if slot.name in state:
                        param.copy_(state[slot.name])
