"""One batch through the stages of a pipeline: each rank does the actions of its schedule, and talks to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hf_zero.distributed.messages import Messages, Received
from hf_zero.extras.pipeline.stage_passes import StagePasses
from hf_zero.extras.pipeline.stage_schedules import EVALUATION, Action, Kind

_RECEIVED_AHEAD = 1  # actions: what the next one needs is on its way while this one runs


@dataclass(frozen=True)
class StageLocation:
    """The stage of a rank, and the ranks of its pipeline."""

    stage: int
    num_stages: int
    virtual_stages: int
    ranks: tuple[int, ...]  # by stage, of the world: this pipeline's

    @property
    def title(self) -> str:
        """The name of the stage in messages: "rank 2, stage 1 of 2"."""
        return f"rank {self.ranks[self.stage]}, stage {self.stage} of {self.num_stages}"

    @property
    def num_parts(self) -> int:
        return self.num_stages * self.virtual_stages

    def part(self, chunk: int) -> int:
        """The number of the part of the model that a chunk of this stage is."""
        return chunk * self.num_stages + self.stage

    def rank_of_part(self, part: int) -> int:
        return self.ranks[part % self.num_stages]


@dataclass
class BatchTimes:
    """The times at which this rank ran its actions, in seconds since the batch began; it is idle between them."""

    schedule: str = EVALUATION
    num_micros: int = 0
    actions: list[tuple[Action, float, float]] = field(default_factory=list)
    total: float = 0.0  # until all ranks had ended
    peak_live: int = 0

    @property
    def busy(self) -> float:
        return sum(end - start for _, start, end in self.actions)


class BatchRun:
    """Runs the order of one batch on this rank.

    Args:
        messages: To the neighbours; None where this pipeline has one stage.
        micros: By micro-batch (inputs, labels): inputs on the first stage, labels on the last, else None.
        around_backward: Entered for each backward; told whether it is the last one of the batch.
    """

    def __init__(
        self,
        passes: StagePasses,
        place: StageLocation,
        messages: Messages | None,
        micros: Sequence[tuple[Any, Any]],
        around_backward: Callable[[bool], Any],
    ) -> None:
        self._passes = passes
        self._place = place
        self._messages = messages
        self._micros = micros
        self._around_backward = around_backward
        self._coming: dict[Action, Received] = {}
        self._local: dict[tuple[int, int, int], Any] = {}  # what goes from a chunk of this rank to another one
        self.results: dict[int, Any] = {}  # by micro-batch, on the last stage: the loss, detached, or the output
        self.times = BatchTimes()
        self.doing: Action | None = None
        self.is_sending = False  # what `doing` has given
        self.began = 0.0  # on this rank's clock

    def run(self, order: Sequence[Action], *, wants_loss: bool = True) -> None:
        self.began = began = time.perf_counter()
        for number, action in enumerate(order):
            self.doing = action
            for following in order[number : number + 1 + _RECEIVED_AHEAD]:
                self._expect(following)
            given = self._take(action)
            start = time.perf_counter()
            result = self._compute(action, given, is_last=number == len(order) - 1, wants_loss=wants_loss)
            self.times.actions.append((action, start - began, time.perf_counter() - began))
            self.is_sending = True
            self._hand_on(action, result)
            self.is_sending = False
        self.doing = None
        self.times.peak_live = self._passes.peak_live
        if self._messages is not None:
            self._messages.wait_for_sends()

    # ---------------------------------------------------------------- compute
    def _compute(self, action: Action, given: Any, *, is_last: bool, wants_loss: bool) -> Any:
        key, passes = (action.chunk, action.micro), self._passes
        if action.kind is Kind.FORWARD:
            ends = self._place.part(action.chunk) == self._place.num_parts - 1
            result = passes.forward(key, given, labels=self._micros[action.micro][1], is_last=ends and wants_loss)
            if ends:
                self.results[action.micro] = result.detach() if wants_loss else result
            return None if ends else result
        if action.kind is Kind.BACKWARD_WEIGHT:
            return passes.backward_of_weights(key)
        with self._around_backward(is_last):
            if action.kind is Kind.BACKWARD_INPUT:
                return passes.backward_of_inputs(key, given)
            return passes.backward(key, given)

    # ---------------------------------------------------------------- what comes
    def _expect(self, action: Action) -> None:
        """Start to receive what an action needs from another rank, if it is known what that is."""
        if action in self._coming or self._messages is None or self._place.num_stages == 1:
            return
        part, micro = self._place.part(action.chunk), action.micro
        if action.kind is Kind.FORWARD and part > 0:
            origin = self._place.rank_of_part(part - 1)
            self._coming[action] = self._messages.receive(origin, self._tag(0, part, micro), f"the {action.title}")
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and part < self._place.num_parts - 1:
            types = self._passes.expected((action.chunk, micro))
            if types:
                origin, tag = self._place.rank_of_part(part + 1), self._tag(1, part, micro)
                self._coming[action] = self._messages.receive_tensors(origin, tag, types, f"the {action.title}")

    def _take(self, action: Action) -> Any:
        """Take the value that an action starts from."""
        if action in self._coming:
            return self._coming.pop(action).wait()
        part, is_forward = self._place.part(action.chunk), action.kind is Kind.FORWARD
        if is_forward and part == 0:
            return self._micros[action.micro][0]
        return self._local.pop((not is_forward, part, action.micro), None if is_forward else [])

    # ---------------------------------------------------------------- what goes
    def _hand_on(self, action: Action, result: Any) -> None:
        part, micro, what = self._place.part(action.chunk), action.micro, f"the {action.title}"
        if action.kind is Kind.FORWARD and part < self._place.num_parts - 1:
            to = self._place.rank_of_part(part + 1)
            if self._messages is None or self._place.num_stages == 1:
                self._local[False, part + 1, micro] = _fresh(result)
            else:
                self._messages.send(to, self._tag(0, part + 1, micro), result, what)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and part > 0 and result:
            to = self._place.rank_of_part(part - 1)
            if self._messages is None or self._place.num_stages == 1:
                self._local[True, part - 1, micro] = result
            else:
                self._messages.send_tensors(to, self._tag(1, part - 1, micro), result, what)

    def _tag(self, direction: int, part: int, micro: int) -> int:
        """The tag of a message that goes forward into a part of the model (0), or back into it (1)."""
        return (direction * self._place.num_parts + part) * len(self._micros) + micro


def _fresh(value: Any) -> Any:
    """Copy `value` as if it had been sent: tensors have no graph."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value
    )
