"""The user's torch optimizer, updating shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.comm import Comm
from hf_zero.errors import ConfigError, StateError
from hf_zero.layout import Run
from hf_zero.optim.rules import check_optimizer
from hf_zero.optim.window import WindowFacts, clip_coefficient, settle_window
from hf_zero.runtime.grads import GradBuffer, GradReducer
from hf_zero.runtime.order import UseOrder


@dataclass(frozen=True)
class OwnedRun:
    """What this rank updates of one parameter."""

    buffer: GradBuffer
    index: int  # of the parameter in the buffer
    run: Run
    masters: list[torch.Tensor]  # views of the master shard: what the user's optimizer holds in its param groups
    grads: list[torch.Tensor]  # views of the gradient shard, as `masters`


class ShardedOptimizer(torch.optim.Optimizer):
    """Keeps the user's optimizer object and points its param groups at this rank's master shards.

    Schedulers, callbacks and logging that hold the user's optimizer or its `param_groups` go on working: the groups
    are the same dicts in the same list; only what is under "params" changes.

    Args:
        optimizer: Built over the model's own parameters. State it already has is cut to the shards.
        reducer: Holds the gradient buffers of all trainable parameters.
        clip: `gradient_clipping`; 0 means the caller clips, or nobody.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        reducer: GradReducer,
        comm: Comm,
        orders: list[UseOrder],
        *,
        clip: float,
        allow_untested: bool,
        after_step: Callable[[], None],
    ) -> None:
        # Not calling super().__init__: the state and the groups are the inner optimizer's own.
        sharded = any(buffer.flat.layout.world_size > 1 for buffer in reducer.buffers)
        check_optimizer(optimizer, sharded=sharded, allow_untested=allow_untested)
        self.optimizer = optimizer
        self._reducer = reducer
        self._comm = comm
        self._orders = orders
        self._clip = clip
        self._after_step = after_step
        self._facts: WindowFacts | None = None
        self.last_norm: float | None = None
        self._owned = self._cut_groups()

    # ---------------------------------------------------------------- the optimizer's face
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state; a checkpoint that loads anywhere is engine.save_checkpoint's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise StateError("parameters cannot be added to an optimizer that runs on shards; build it with all of them")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what has been accumulated in this window."""
        self._reducer.clear()
        self._facts = None

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the mean gradient so that its L2 norm is at most `max_norm`; return the norm before.

        All ranks must call. `inf` only measures. Follows torch.nn.utils.clip_grad_norm_.
        """
        norm = self._settle().norm
        factor = clip_coefficient(norm, max_norm)
        if factor != 1.0:
            for buffer in self._reducer.buffers:
                buffer.shard.scale(factor)
        self.last_norm = norm
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the masters from the mean gradient, bring parameters up to date, start a new window.

        All ranks must call. A parameter that had no gradient on any rank is left alone, as torch does.
        """
        if closure is not None:
            raise StateError("a closure cannot be used on shards: call backward, then step()")
        for buffer in self._reducer.buffers:
            buffer.flat.check_views()
        facts = self._settle()
        if self._clip > 0:
            self.clip_grad_norm(self._clip)
        self.last_norm = facts.norm
        number = {id(buffer): i for i, buffer in enumerate(self._reducer.buffers)}
        for owned in self._owned:
            present = facts.has_grad[number[id(owned.buffer)]][owned.index]
            for master, grad in zip(owned.masters, owned.grads, strict=True):
                master.grad = grad.to(master.dtype) if present else None
        self.optimizer.step()
        for owned in self._owned:
            for master in owned.masters:
                master.grad = None
        self._publish()
        self._reducer.clear()
        self._facts = None
        self._after_step()

    # ---------------------------------------------------------------- inside
    def _settle(self) -> WindowFacts:
        if self._facts is None:
            with torch.no_grad():
                self._facts = settle_window(self._reducer, self._comm, self._orders)
        return self._facts

    def _publish(self) -> None:
        """Masters -> parameters: cast, and gather where parameters stay whole on ranks that own a part each."""
        gathering = []
        for buffer in self._reducer.buffers:
            flat = buffer.flat
            flat.refresh()
            if not flat.on_demand and flat.layout.world_size > 1:
                flat.gather_start()
                gathering.append(flat)
        for flat in gathering:
            flat.gather_finish()

    def _cut_groups(self) -> list[OwnedRun]:
        places = {}
        for buffer in self._reducer.buffers:
            for index, param in enumerate(buffer.flat.params):
                places[id(param)] = (buffer, index)
        runs = {
            id(buffer): {run.name: run for run in buffer.flat.layout.runs(buffer.flat.rank)}
            for buffer in self._reducer.buffers
        }
        owned: list[OwnedRun] = []
        old_state = self.optimizer.state
        new_state: dict[torch.Tensor, Any] = {}
        for group in self.optimizer.param_groups:
            mine: list[torch.Tensor] = []
            for param in group["params"]:
                if id(param) not in places:
                    if param.requires_grad:
                        raise ConfigError(
                            f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not a trainable "
                            "parameter of the model given to hf_zero.\nBuild the optimizer over model.parameters()."
                        )
                    continue
                buffer, index = places[id(param)]
                run = runs[id(buffer)].get(buffer.flat.layout.slots[index].name)
                if run is None:
                    continue  # other ranks own all of it
                assert buffer.flat.master is not None
                masters, grads = _same_cut(buffer.flat.master.run_tensors(run), buffer.shard.run_tensors(run))
                piece = OwnedRun(buffer, index, run, masters, grads)
                owned.append(piece)
                mine.extend(masters)
                if param in old_state:
                    new_state.update(_cut_state(old_state[param], piece))
            group["params"] = mine
        old_state.clear()
        old_state.update(new_state)
        return owned

    def owned_runs(self) -> Iterator[OwnedRun]:
        """What this rank updates, in the order of the param groups."""
        yield from self._owned


def _same_cut(a: list[torch.Tensor], b: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two lists that tile one run, one of them perhaps in one piece, cut at the same places."""
    if len(a) == len(b):
        return a, b
    if len(a) == 1:
        return list(torch.split(a[0].view(-1), [tensor.numel() for tensor in b])), b
    if len(b) == 1:
        return a, list(torch.split(b[0].view(-1), [tensor.numel() for tensor in a]))
    raise AssertionError(f"a run cut into {len(a)} and {len(b)} tensors")


def _cut_state(state: dict[str, Any], owned: OwnedRun) -> dict[torch.Tensor, dict[str, Any]]:
    """State that the optimizer had for a whole parameter, for the tensors that this rank updates of it."""
    numel = owned.buffer.flat.layout.slots[owned.index].numel
    cut: dict[torch.Tensor, dict[str, Any]] = {master: {} for master in owned.masters}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() == numel:
            flat = value.detach().reshape(-1)
            mine = torch.cat([flat[piece.start : piece.end] for piece in owned.run.pieces])
            chunks = torch.split(mine, [master.numel() for master in owned.masters])
            for master, chunk in zip(owned.masters, chunks, strict=True):
                cut[master][key] = chunk.clone().view(master.shape)
        else:
            for master in owned.masters:
                cut[master][key] = value.clone() if isinstance(value, torch.Tensor) else value
    return cut
