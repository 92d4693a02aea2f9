"""The orders in which a stage computes its micro-batches. Pure integers: no torch, no processes.

The orders are those of GPipe (arXiv:1811.06965), PipeDream-Flush or 1F1B (arXiv:2006.09503), interleaved 1F1B
(arXiv:2104.04473, section 2.2) and ZB-H1 (arXiv:2401.10241, section 4.1). All of them end with a flush: an update uses
gradients of one version of the weights, so the result is that of one process.

The backwards after the last forward of 1F1B cost more than its paper says they must: stages wait for each other's
whole backwards. Here these few are in two halves, as in zero bubble, and a stage sends the gradients of its inputs
before it computes those of its weights. No activation lives longer for it.

A stage has `virtual_stages` model chunks: chunk c of stage s is the (c * stages + s)-th part of the model.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """The kinds of work that an action does."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and of weights
    BACKWARD_INPUT = "I"  # gradients of inputs alone: the stage before waits for them
    BACKWARD_WEIGHT = "W"  # gradients of weights alone, which nobody waits for before the update


@dataclass(frozen=True)
class Action:
    """One piece of work of a stage."""

    kind: Kind
    chunk: int  # of this stage's
    micro: int  # number of the micro-batch

    @property
    def title(self) -> str:
        """The name of the action in messages: "backward of micro-batch 2"."""
        return f"{self.kind.name.lower().replace('_', ' of ')} of micro-batch {self.micro}"

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro}" + (f".{self.chunk}" if self.chunk else "")


def _gpipe(stage: int, stages: int, micros: int, virtual_stages: int) -> list[Action]:
    return [
        *_forwards(stage, stages, micros, virtual_stages),
        *(Action(Kind.BACKWARD, chunk, micro) for chunk in reversed(range(virtual_stages)) for micro in range(micros)),
    ]


def _forwards(stage: int, stages: int, micros: int, virtual_stages: int) -> list[Action]:
    return [Action(Kind.FORWARD, chunk, micro) for chunk in range(virtual_stages) for micro in range(micros)]


def _one_forward_one_backward(stage: int, stages: int, micros: int, virtual_stages: int) -> list[Action]:
    if virtual_stages > 1:
        return _interleaved(stage, stages, micros, virtual_stages)
    order = published_1f1b(stage, stages, micros)
    if stage == 0:  # nobody waits for its gradients of inputs
        return order
    after_forwards = order.index(Action(Kind.FORWARD, 0, micros - 1)) + 1
    halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    return order[:after_forwards] + [Action(half, 0, one.micro) for one in order[after_forwards:] for half in halves]


def published_1f1b(stage: int, stages: int, micros: int) -> list[Action]:
    """1F1B with whole backwards, as in its paper."""
    forwards = [Action(Kind.FORWARD, 0, micro) for micro in range(micros)]
    backwards = [Action(Kind.BACKWARD, 0, micro) for micro in range(micros)]
    return _alternate(forwards, backwards, warm_up=stages - stage - 1)


def _interleaved(stage: int, stages: int, micros: int, virtual_stages: int) -> list[Action]:
    """Micro-batches go through the chunks in groups of as many as there are stages.

    The order is made for full groups; of the last one those that are not there are left out, which keeps it valid:
    nothing depends on another micro-batch.
    """
    groups = -(-micros // stages)
    forwards, backwards = (
        [
            Action(kind, chunk, micro)
            for group in range(groups)
            for chunk in chunks
            for micro in range(group * stages, (group + 1) * stages)
        ]
        for kind, chunks in (
            (Kind.FORWARD, range(virtual_stages)),
            (Kind.BACKWARD, range(virtual_stages - 1, -1, -1)),
        )
    )
    warm_up = 2 * (stages - stage - 1) + (virtual_stages - 1) * stages
    return [action for action in _alternate(forwards, backwards, warm_up) if action.micro < micros]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turns, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    order = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):
        order += [forward, backward]
    return order + list(backwards[steady:])


def _zero_bubble(stage: int, stages: int, micros: int, virtual_stages: int) -> list[Action]:
    """1F1B with backwards in two halves; the weights' half of a micro-batch comes `stage` micro-batches later, and so
    fills the time in which a late stage would wait. As many micro-batches live as in 1F1B on the first stage."""
    order: list[Action] = []
    waiting: list[int] = []  # micro-batches whose gradients of weights are to come
    left = micros
    for action in published_1f1b(stage, stages, micros):
        if action.kind is Kind.FORWARD:
            order.append(action)
            left -= 1
            continue
        order.append(Action(Kind.BACKWARD_INPUT, 0, action.micro))
        waiting.append(action.micro)
        if len(waiting) > stage or left == 0:
            order.append(Action(Kind.BACKWARD_WEIGHT, 0, waiting.pop(0)))
    return order + [Action(Kind.BACKWARD_WEIGHT, 0, micro) for micro in waiting]


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "1f1b": _one_forward_one_backward,
    "gpipe": _gpipe,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}
EVALUATION = "evaluation"  # the forwards alone


def order_of(schedule: str, stage: int, stages: int, micros: int, virtual_stages: int = 1) -> list[Action]:
    """The actions of stage `stage` of `stages` for `micros` micro-batches, one after the other."""
    make = _forwards if schedule == EVALUATION else SCHEDULES[schedule]
    return make(stage, stages, micros, virtual_stages)


# -------------------------------------------------------------------- what follows from an order
def peak_live(order: Sequence[Action]) -> int:
    """Most (chunk, micro-batch) pairs whose activations a stage holds at a time."""
    live = peak = 0
    for action in order:
        live += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}.get(action.kind, 0)
        peak = max(peak, live)
    return peak


# If stages are equal, a backward costs two forwards, and each of its halves one.
_COSTS: dict[Kind, float] = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}


def bubble_share(schedule: str, stages: int, micros: int, virtual_stages: int = 1) -> float:
    """The part of all stages' time in which they compute nothing, if they are equal and messages take no time.

    With p stages and m micro-batches it is (p - 1) / (m + p - 1) of GPipe, 2 (p - 1) / (3 m + 2 (p - 1)) of 1F1B,
    (p - 1) / (v m + p - 1) of interleaved 1F1B where p divides m, and (p - 1) / (3 m + p - 1) of zero bubble where m
    is at least p.
    """
    orders = [order_of(schedule, stage, stages, micros, virtual_stages) for stage in range(stages)]
    spans = [span for times in simulate(orders, virtual_stages) for span in times]
    room = stages * max(end for _, end in spans)
    return (room - sum(end - start for start, end in spans)) / room


def simulate(
    orders: Sequence[Sequence[Action]], virtual_stages: int = 1, costs: Sequence[Mapping[Kind, float]] | None = None
) -> list[list[tuple[float, float]]]:
    """Compute when each action of each stage starts and ends, if messages take no time.

    Args:
        costs: By stage; None: counted in forwards, of equal stages.
    Raises:
        AssertionError: The orders wait for each other for ever.
    """
    stages = len(orders)
    last = stages * virtual_stages - 1
    ended: dict[tuple[str, int, int], float] = {}  # (F or B, part of the model, micro-batch) -> time
    times: list[list[tuple[float, float]]] = [[] for _ in orders]
    clock = [0.0] * stages
    costs = costs or [_COSTS] * stages
    while any(len(done) < len(order) for done, order in zip(times, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            while len(times[stage]) < len(order):
                action = order[len(times[stage])]
                part = action.chunk * stages + stage
                if action.kind is Kind.FORWARD:
                    needs = [] if part == 0 else [("F", part - 1, action.micro)]
                elif action.kind is Kind.BACKWARD_WEIGHT:
                    needs = [("B", part, action.micro)]
                else:
                    needs = [("F", part, action.micro)]
                    needs += [] if part == last else [("B", part + 1, action.micro)]
                if not all(need in ended for need in needs):
                    break
                start = max([clock[stage], *(ended[need] for need in needs)])
                clock[stage] = start + costs[stage][action.kind]
                times[stage].append((start, clock[stage]))
                if action.kind is not Kind.BACKWARD_WEIGHT:
                    ended["F" if action.kind is Kind.FORWARD else "B", part, action.micro] = clock[stage]
                moved = True
        if not moved:
            raise AssertionError(f"stages wait for each other: {[len(done) for done in times]} actions are done")
    return times
