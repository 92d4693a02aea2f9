"""The agreement of all ranks between the last backward of an accumulation window and the optimizer step.

One all-reduce of step statistics carries it: which gradient accumulators have late gradients on some rank, which
parameters had a gradient on any rank, the squared norm, and whether their param groups are the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.distributed.comm import Comm
from hf_zero.errors import StateError
from hf_zero.optim.hyperparameters import groups_digest, refuse_different
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.param_grads import ParamGrads
from hf_zero.runtime.reduce_schedule import GradReducer

ParamGroups = Sequence[Mapping[str, Any]]
_FROZEN = float(1 << 26)  # more than there are ranks, and exact in sums of float64


@dataclass(frozen=True)
class StepFacts:
    """The outcome of the ballot, equal on all ranks."""

    norm: float  # L2 norm of the full mean gradient, before clipping
    has_grad: tuple[tuple[bool, ...], ...]  # per gradient accumulator, per parameter: on any rank


def hold_ballot(
    param_grads: ParamGrads,
    reducer: GradReducer,
    comm: Comm,
    param_groups: ParamGroups,
    *,
    closes: bool = True,
    purpose: str = "step",
) -> StepFacts:
    """Bring every gradient of the accumulation window into the shards and hold the ballot. All ranks must call.

    A second ballot is needed only where some rank had gradients that came after the reduce of their unit.

    Args:
        closes: A step follows. Then StateError is raised, on all ranks, for param groups whose numbers differ between
            ranks, and for a parameter that no rank had a gradient of, where `ignore_unused_parameters` is false.
        purpose: What the ballot is for; DivergenceError where theirs differ, such as one rank that clips alone.
    """
    param_grads.collect()
    reducer.reduce_remaining()
    for acc in reducer.accumulators:
        acc.drop_missing()
    facts = _vote(param_grads, reducer, comm, param_groups, purpose)
    if any(facts.rests):
        reducer.reduce_late_gradients(facts.rests)
        facts = _vote(param_grads, reducer, comm, param_groups, purpose)
    if not facts.same_changes:
        raise param_grads.unequal(comm.all_gather_object(param_grads.changes, "changes of gradients"))
    if closes and not facts.same_numbers:
        refuse_different(param_groups, comm)
    if closes:
        _refuse_frozen_apart(reducer.accumulators, facts.frozen, comm)
        _refuse_unused(reducer.accumulators, facts.has_grad)
    return StepFacts(math.sqrt(facts.norm_sq), tuple(facts.has_grad))


def _refuse_frozen_apart(accumulators: Sequence[GradAccumulator], frozen: torch.Tensor, comm: Comm) -> None:
    """Raise StateError for the first parameter that is frozen on some ranks only; see _Outcome."""
    apart = ((frozen > 0) & (frozen < comm.world_size)).nonzero().flatten().tolist()
    if apart:
        all_of = [(acc, index) for acc in accumulators for index in range(len(acc.flat.params))]
        acc, index = all_of[apart[0]]
        rows = comm.all_gather_numbers([_value_of(acc, index)], "frozen parameters")
        ranks = [str(rank) for rank, (value,) in enumerate(rows) if value == _FROZEN]
        raise StateError(
            f"{acc.flat.layout.slots[index].name} requires no gradient on rank(s) {', '.join(ranks)}, and does on "
            "others: its mean would lack their data.\nCall requires_grad_ alike on all ranks."
        )


def _refuse_unused(accumulators: Sequence[GradAccumulator], has_grad: Sequence[Sequence[bool]]) -> None:
    unused = [
        slot.name
        for acc, present in zip(accumulators, has_grad, strict=True)
        if not acc.allow_unused
        for slot, there in zip(acc.flat.layout.slots, present, strict=True)
        if not there
    ]
    if unused:
        raise StateError(
            f"{len(unused)} parameter(s) had no gradient on any rank since the last step, first: "
            f"{', '.join(sorted(unused)[:5])}; zero_optimization.ignore_unused_parameters = false forbids that.\n"
            "Let every trainable parameter take part in the loss, freeze it (requires_grad_(False)), or set the key "
            "to true: such parameters are then left alone."
        )


@dataclass(frozen=True)
class _Outcome:
    norm_sq: float
    same_numbers: bool  # in the param groups
    same_changes: bool  # of gradients by hand
    rests: list[bool]
    has_grad: list[tuple[bool, ...]]
    frozen: torch.Tensor  # [parameter of all accumulators]: the ranks where it has no gradient and requires none


def _vote(
    param_grads: ParamGrads,
    reducer: GradReducer,
    comm: Comm,
    param_groups: ParamGroups,
    purpose: str,
) -> _Outcome:
    norms = _on_host([*map(_norms_of_parts, reducer.accumulators)])
    norm_sq = local_norm_sq(reducer.accumulators, norms, comm)
    digests = [groups_digest(param_groups), param_grads.digest(norm_sq)]
    numbers = [len(acc.flat.params) for acc in reducer.accumulators]
    ballot = [0.0, *(float(acc.has_late_gradients) for acc in reducer.accumulators)]
    for acc, number in zip(reducer.accumulators, numbers, strict=True):
        ballot += [_value_of(acc, index) for index in range(number)]
    ballot += [*digests, *(-digest for digest in digests)]
    values = torch.tensor(ballot, dtype=torch.float64, device="cpu")
    values[0] = norm_sq
    combined = comm.vote(values, purpose, largest=2 * len(digests))
    square, rests, counts, highest, lowest = combined.split([1, len(numbers), sum(numbers), *2 * [len(digests)]])
    same_numbers, same_changes = (highest == -lowest).tolist()
    there = iter((counts % _FROZEN > 0).tolist())
    return _Outcome(
        norm_sq=square.item(),
        same_numbers=same_numbers,
        same_changes=same_changes,
        rests=(rests > 0).tolist(),
        has_grad=[tuple(itertools.islice(there, number)) for number in numbers],
        frozen=counts // _FROZEN,
    )


def _value_of(acc: GradAccumulator, index: int) -> float:
    """The value that a rank adds for a parameter. Of their sum, the ranks with a gradient are the part below _FROZEN,
    and those where it is frozen the multiple of that."""
    if index in acc.seen:
        return 1.0
    return 0.0 if acc.flat.params[index].requires_grad else _FROZEN


def local_norm_sq(accumulators: Sequence[GradAccumulator], norms: Sequence[torch.Tensor], comm: Comm) -> torch.Tensor:
    """Squared L2 norm of this rank's gradient shards (padding is zero); the sum over ranks is the full gradient's.

    fp64 0-dim, on the host. `norms`: of each accumulator's parts, on the host. They are taken on the device where the
    part was reduced there, in the gradient's type (16-bit types in fp32), and summed in fp64.
    """
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for acc, mine in zip(accumulators, norms, strict=True):
        replicas = comm.world_size // acc.flat.layout.world_size
        total += mine.double().square().sum() / replicas
    return total


def _norms_of_parts(acc: GradAccumulator) -> torch.Tensor:
    norms = acc.norms()
    if norms.device.type != "cpu" and not acc.flat.placement.native:
        acc.join_copies()  # the host may update right after the ballot, which waits for these
    return norms


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same 1-D tensors; those of the device come in one copy, which the host waits for."""
    away = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if not away:
        return tensors
    brought = iter(torch.cat(away).cpu().split([tensor.numel() for tensor in away]))
    return [tensor if tensor.device.type == "cpu" else next(brought) for tensor in tensors]


def clip_coefficient(norm: float, max_norm: float) -> float:
    """torch.nn.utils.clip_grad_norm_'s factor: 1 where nothing is to be clipped."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 and math.isfinite(max_norm) else 1.0
