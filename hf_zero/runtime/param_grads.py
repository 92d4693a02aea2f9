"""The gradients that `parameter.grad` shows between a backward and the step, and what the user has done to them.

[Note: parameter.grad]
Gradients live in flat parameters. Where a rank holds the full mean of a parameter's gradient (stage 0 after the last
backward of a window), `.grad` is a view of it: torch's clipping works, and edits count. Everywhere else `.grad` is a
stand-in with the sizes of the gradient and no values: whoever touches it gets an error that names the right call.
`.grad = None` drops the gradient, as in torch. What is shown goes before the next forward or backward, so that
autograd finds no gradient to add to; where it does find a stand-in, that keeps what was added for the reducer.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.distributed.digests import digest_of
from hf_zero.distributed.processes import call_site
from hf_zero.errors import StateError
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.grad_stand_in import INSTEAD, GradStandIn
from hf_zero.runtime.reduce_schedule import GradReducer
from hf_zero.runtime.step_events import StepEvents
from hf_zero.sharding.sharded_param import asks_nobody


class _Place:
    """The flag that some gradient is shown. It refers to nothing, so that a hook of autograd can hold it."""

    is_used = False


@dataclass(slots=True, eq=False)
class _Shown:
    """A parameter's place in an accumulator, and what is shown of it. Made once: a backward shows all of them."""

    acc: GradAccumulator
    index: int
    stand_in: GradStandIn
    param: nn.Parameter
    grad: torch.Tensor
    version: int = 0


class ParamGrads:
    """Shows the gradients of one engine's accumulators, and takes the user's changes over.

    Owned by the step schedule.
    """

    def __init__(self, reducer: GradReducer, events: StepEvents) -> None:
        self._reducer = reducer
        self._accumulators = reducer.accumulators
        self._events = events
        self._shown: list[_Shown] = []
        self.place = _Place()
        self._places: list[list[_Shown]] = []  # of the accumulators; there may be more of them between steps
        self._changes: list[str] = []  # of what all ranks must change alike, in this window
        self._edited = False  # values were, not only dropped
        self._weights: dict[str, int] = {}  # weights that were written to in this window -> what they are known by

    @asks_nobody
    def show(self) -> None:
        """A backward is over."""
        self.hide()
        for acc in self._accumulators[len(self._places) :]:
            self._places.append(_places_of(acc))
        for acc, places in zip(self._accumulators, self._places, strict=True):
            means = acc.unsharded_mean()
            trained = [one for one in places if one.param.requires_grad]
            if means is None:
                self._show([one for one in places if one.index in acc.seen], None)
            elif len(trained) == len(places):
                self._show(trained, means)
            else:
                self._show(trained, [means[one.index] for one in trained])
                self._show([one for one in places if one.index in acc.seen and one not in trained], None)
        self.place.is_used = bool(self._shown)

    def _show(self, places: Sequence[_Shown], means: Sequence[torch.Tensor] | None) -> None:
        grads = [one.stand_in for one in places] if means is None else means
        for one, grad in zip(places, grads, strict=True):
            param = one.param
            if grad.dtype != param.dtype:  # or somebody has cast the live model, which the next forward refuses
                param.grad_dtype = grad.dtype
            param.grad = one.grad = grad
            one.version = grad._version
        self._shown += places

    @asks_nobody
    def hide(self) -> None:
        """Take the user's changes over, and show nothing: autograd is about to accumulate."""
        if self._shown:
            self.collect()
            self._take_away()

    def _take_away(self) -> None:
        for one in self._shown:
            one.param.grad = None
            if one.grad.dtype != one.param.dtype:
                one.param.grad_dtype = one.param.dtype
        self._shown.clear()
        self.place.is_used = False

    @torch.no_grad()
    @asks_nobody
    def collect(self) -> bool:
        """Take over what the user did to what is shown; return whether that was anything.

        Raises StateError where a stand-in was replaced.
        """
        shown, changed = self._shown, False
        if shown and all(one.param.grad is None for one in shown):  # model.zero_grad() and the like
            self.discard()
            return True
        for one in shown:
            grad = one.param.grad
            if grad is one.grad:
                # A stand-in cannot be edited; autograd may have added to it before the start of its backward was seen.
                if grad._version != one.version and not isinstance(grad, GradStandIn):
                    one.version = grad._version
                    self._note_edit(one)
                    changed = True
            elif grad is None:
                self._events.gradients_change()
                if one.acc.drop_gradient(one.index) and one.acc.flat.layout.slots[one.index].numel:
                    self._changes.append(f"dropped {_name(one)}")
                changed = True
            elif isinstance(one.grad, GradStandIn):
                raise _lost(one.acc, one.index)
            else:
                one.grad.copy_(grad)
                one.param.grad = one.grad
                self._note_edit(one)
                changed = True
        return changed

    def _note_edit(self, one: _Shown) -> None:
        # A parameter without gradient is left alone; it is shown zeros, which clipping touches as well.
        if one.index not in one.acc.seen and one.grad.count_nonzero():
            one.acc.seen.add(one.index)
        self._changes.append(f"edited {_name(one)}")
        self._edited = True

    @torch.no_grad()
    @asks_nobody
    def collect_all(self) -> bool:
        """Collect before a step: gradients that were put where none was shown count too. See `collect`."""
        changed = self.collect()
        changed |= self._events.collect_weight_edits()
        known = {id(one.param) for one in self._shown}
        for acc in self._accumulators:
            for index, param in enumerate(acc.flat.params):
                if id(param) in known or param.grad is None:
                    continue
                grad, param.grad = param.grad, None
                if not acc.set_mean(index, grad):
                    raise _lost(acc, index)
                self._changes.append(f"edited {acc.flat.layout.slots[index].name}")
                self._edited = changed = True
        return changed

    def note_weights(self, marks: Mapping[str, int]) -> None:
        """Weights were written to by hand, on all ranks alike: by name, what they are known by. Before it is kept."""
        self._events.gradients_change()
        self._weights.update(marks)

    def discard(self) -> None:
        """The user drops the gradients of this window, on all ranks."""
        self._events.gradients_change()
        dropped = [] if all(acc.is_empty for acc in self._accumulators) else [*self._changes, "dropped all"]
        weights = dict(self._weights)
        self.clear()
        self._changes, self._weights = dropped, weights

    @asks_nobody
    def clear(self) -> None:
        """Begin another accumulation window."""
        self._reducer.clear()
        self._take_away()
        self._changes, self._edited = [], False
        self._weights.clear()

    def forget(self) -> None:
        """Drop all of a pass that was broken off on all ranks, and whose connections are closed."""
        self._reducer.forget()
        self.clear()

    def digest(self, norm_sq: torch.Tensor) -> float:
        """Return a digest of the changes in this window, for the vote of a step.

        Args:
            norm_sq: The squared norm of all gradients, 0-dim.
        """
        values = struct.pack("d", float(norm_sq)) if self._edited else b""
        return digest_of(repr(self.changes).encode() + values) if self.changes else 0.0

    def unequal(self, everyone: Sequence[list[str]]) -> StateError:
        """Return the error for all ranks where digests differ; `everyone` has the changes by rank."""
        said = [f"rank {rank}: {', '.join(theirs[:5]) or 'nothing'}" for rank, theirs in enumerate(everyone)]
        return StateError(
            "the ranks changed gradients or weights by hand in different ways, or to different values:\n"
            + "\n".join(said)
            + "\nDrop or edit gradients, which are means over ranks, and write to weights alike on every rank. "
            "nn.Embedding(max_norm=...) scales the rows of a rank's own batch: leave max_norm out, and scale the rows "
            "after engine.step() inside `with hf_zero.gathered_params(model, write_rank=0):`.\n"
            f"Called from: {call_site()}"
        )

    @property
    def changes(self) -> list[str]:
        """The changes that this rank made in this window, as texts."""
        return self._changes + [f"wrote to {name} ({bits & 0xFFFFFF:06x})" for name, bits in self._weights.items()]


def _places_of(acc: GradAccumulator) -> list[_Shown]:
    flat = acc.flat
    stand_ins = [
        GradStandIn(placeholder, slot.name)
        for placeholder, slot in zip(flat.placeholders, flat.layout.slots, strict=True)
    ]
    return [
        _Shown(acc, index, stand_in, param, stand_in)
        for index, (stand_in, param) in enumerate(zip(stand_ins, flat.params, strict=True))
    ]


def _lost(acc: GradAccumulator, index: int) -> StateError:
    return StateError(
        f"rank {acc.comm_rank}: the .grad of {acc.flat.layout.slots[index].name} was set by hand, and the step "
        f"would not use it: gradients are in shards.\n{INSTEAD}"
    )


def _name(one: _Shown) -> str:
    return one.acc.flat.layout.slots[one.index].name
