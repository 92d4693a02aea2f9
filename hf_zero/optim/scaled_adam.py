"""Adam and AdamW with a first moment of 8 bits, a second one of 16, and master weights of 16 (FP8-LM, section 2.2).

[Note: States with a scale]
A state is a ScaledShard: between steps 8 or 16 bits, in a step fp32, for one parameter at a time, which torch's own
Adam updates. The scale of a moment follows from a bound that all ranks know: what Adam makes of the largest moment and
the largest gradient of the whole parameter. Ranks exchange the largest values once a step, so a moment has one scale
on all ranks, at every stage and number of ranks. The scale of a master follows from this rank's own values: with 11
binary digits and 40 binary orders of magnitude, values of other scales are rounded alike. Both states of 16 bits are
rounded at random (stochastic_rounding.py): in most steps they change by less than half a unit of their last digit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.adam import adam

from hf_zero.distributed.comm import Comm
from hf_zero.errors import ConfigError
from hf_zero.native.adam import AdamRule
from hf_zero.optim.param_groups import OwnedSlice
from hf_zero.optim.update_rule import MOMENTS, UpdateRule
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.scaled_grads import ScaledGradAccumulator
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.scaled_shard import ScaledShard

# Elements that are decoded at once, unless one parameter has more: few operations, and 16 bytes of fp32 for each.
_RANGE_NUMEL = 1 << 25
TYPES = (torch.float8_e4m3fn, torch.float16)  # of the moments, in the order of MOMENTS


@dataclass(eq=False)
class _State:
    """The moments of one flat parameter; arrays follow its parameters."""

    grads: ScaledGradAccumulator
    moments: dict[str, ScaledShard]
    groups: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by the number of a parameter, read each step
    steps: dict[int, int] = field(default_factory=dict)  # updates so far

    @classmethod
    def of(cls, acc: GradAccumulator) -> _State:
        assert isinstance(acc, ScaledGradAccumulator)
        return cls(acc, dict(zip(MOMENTS, moments_of(acc.flat), strict=True)))

    @property
    def flat(self) -> FlatParam:
        return self.grads.flat

    @property
    def master(self) -> ScaledShard:
        assert isinstance(self.flat.master, ScaledShard)
        return self.flat.master

    @property
    def shards(self) -> tuple[ScaledShard, ...]:
        return (self.master, *self.moments.values())


def moments_of(flat: FlatParam) -> list[ScaledShard]:
    """Make the moments of a flat parameter, of zeros, in the order of MOMENTS."""
    return [ScaledShard(flat.layout, flat.rank, flat.full.device, dtype) for dtype in TYPES]


class ScaledAdam(UpdateRule):
    """The update of scaled states on the device. See [Note: States with a scale]."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._states: dict[GradAccumulator, _State] = {}

    def take_in(self, owned: Sequence[tuple[OwnedSlice, Mapping[str, Any]]], order: Sequence[GradAccumulator]) -> None:
        """See UpdateRule.take_in."""
        for acc in order:  # on all ranks alike, also where this one owns nothing of it
            self._states[acc] = _State.of(acc)
        for slice_, group in owned:
            if not AdamRule.of(group).bias_correction:
                raise ConfigError("msamp O2 and O3 update as torch's Adam: remove bias_correction = false.")
            self._states[slice_.acc].groups[slice_.index] = group

    # ---------------------------------------------------------------- the step
    def step(self, has_grad: Mapping[GradAccumulator, Sequence[bool]], factor: float) -> bool:
        """See UpdateRule.step."""
        for state, largest in zip(self._states.values(), self._largest(), strict=True):
            for first, end in _alike(state, has_grad[state.grads]):
                _update(state, first, end, largest[:, first:end], factor)
            state.flat.refresh()
        return True

    def _largest(self) -> list[torch.Tensor]:
        """The largest values of states over all ranks, fp32: for each flat parameter [master and moments, parameters].

        All ranks must call.
        """
        mine = [torch.stack([shard.amaxes for shard in state.shards]) for state in self._states.values()]
        if all(state.flat.layout.world_size == 1 for state in self._states.values()):
            return mine
        values = torch.cat([one.view(-1) for one in mine])
        largest = self._comm.vote(values.double(), "largest values of states", largest=len(values)).to(values)
        pieces = largest.split([one.numel() for one in mine])
        return [piece.view_as(one) for piece, one in zip(pieces, mine, strict=True)]

    # ---------------------------------------------------------------- state in and out
    def state_of(self, owned: OwnedSlice) -> dict[str, Any]:
        """See UpdateRule.state_of."""
        state = self._states[owned.acc]
        steps = state.steps.get(owned.index, 0)
        return {**state.moments, "step": steps} if steps else {}

    def load_run(self, owned: OwnedSlice, values: Mapping[str, Any]) -> None:
        """See UpdateRule.load_run. The scales are this rank's until `restart_at`."""
        state = self._states[owned.acc]
        for kind, moment in state.moments.items():
            moment.write_slice(owned.slice, values.get(kind, torch.zeros(owned.slice.numel, device="cpu")))
        state.steps[owned.index] = int(values.get("step", 0))

    def restart_at(self, step: int) -> None:
        """Give the moments that were loaded scales that are the same on all ranks. All ranks must call."""
        for state, largest in zip(self._states.values(), self._largest(), strict=True):
            for shard, bounds in zip(state.shards[1:], largest[1:], strict=True):
                for number in state.groups:
                    shard.rescale(number, bounds[number])

    def moment_bytes(self) -> int:
        """See UpdateRule.moment_bytes."""
        return sum(moment.nbytes for state in self._states.values() for moment in state.moments.values())


def _alike(state: _State, has_grad: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, end) of consecutive parameters whose update is the same: by group and number of updates."""
    spans, first, end = state.master.spans, 0, 0
    for number in sorted(number for number in state.groups if has_grad[number]):
        is_alike = (
            number == end
            and state.groups[number] is state.groups[first]
            and state.steps.get(number, 0) == state.steps.get(first, 0)
            and spans[number][1] - spans[first][0] <= _RANGE_NUMEL
        )
        if not is_alike:
            if first < end:
                yield first, end
            first = number
        end = number + 1
    if first < end:
        yield first, end


def _update(state: _State, first: int, end: int, largest: torch.Tensor, factor: float) -> None:
    """Update what this rank owns of parameters that are `_alike`.

    Args:
        largest: The largest master weight, first and second moment of the whole parameters, [3, parameters].
        factor: Multiplies the gradients.
    """
    rule, group = AdamRule.of(state.groups[first]), state.groups[first]
    step = state.steps.get(first, 0) + 1
    state.steps.update(dict.fromkeys(range(first, end), step))
    params = state.master.range_of(first, end)
    grad = state.grads.shard.decode(params).mul_(factor)
    master, exp_avg, exp_avg_sq = (shard.decode(params) for shard in state.shards)
    largest_grad = state.grads.shard.amaxes[first:end] * abs(factor)
    if not rule.decoupled:
        largest_grad = largest_grad + rule.weight_decay * largest[0]
    adam(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), float(step - 1), device=master.device)],
        foreach=False,
        fused=True,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=bool(group.get("maximize", False)),
        decoupled_weight_decay=rule.decoupled,
    )
    state.master.encode(params, master, seed=_seed(step, 0))
    state.moments["exp_avg"].encode(params, exp_avg, rule.beta1 * largest[1] + (1 - rule.beta1) * largest_grad)
    bounds = rule.beta2 * largest[2] + (1 - rule.beta2) * largest_grad.square()
    state.moments["exp_avg_sq"].encode(params, exp_avg_sq, bounds, seed=_seed(step, 1))


def _seed(step: int, state: int) -> int:
    """The seed of the rounding of a state in a step."""
    return ((2 * step + state) * 0x632BE5AB) & 0x7FFFFFFF
