"""Optimizer states of planned units: the user's optimizer on meta shards, or what the native rule would keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.errors import ConfigError
from hf_zero.optim.offload.host_adam import HostAdamSettings
from hf_zero.optim.offload.host_state import HostState
from hf_zero.optim.offload.param_writer import make_writer, must_stage
from hf_zero.optim.param_groups import ShardedGroups
from hf_zero.optim.registry import check_native, check_optimizer, needs_unsharded, optimizer_of
from hf_zero.optim.scaled_adam import moments_of
from hf_zero.optim.updates.elementwise import drop_gradients, give_gradients, sub_groups
from hf_zero.runtime.build import BuiltUnits


class _Reader:
    def wait(self) -> None:
        return None


class PlannedStates:
    """The states that ShardedOptimizer and HostAdam would hold for `built`, made by the parts that they use.

    Args:
        stand_ins: By id of the model's parameter: the meta parameter in its place.
        factory: Makes the optimizer from parameters; None takes the configuration's block, else AdamW.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        built: BuiltUnits,
        stand_ins: Mapping[int, nn.Parameter],
        factory: Callable[[Iterable[Any]], torch.optim.Optimizer] | None,
        *,
        on_host: bool,
    ) -> None:
        self._built = built
        trained = [param for param in stand_ins.values() if param.requires_grad]
        self._optimizer = None
        self._owned = []
        if trained and built.grads:
            make = factory or (lambda params: _optimizer_of(config.optimizer, params, on_host=on_host))
            self._optimizer = make(trained)
            sharded = any(flat.flat.layout.world_size > 1 for flat in built.grads)
            if sharded and needs_unsharded(self._optimizer) is not None:
                kind = type(self._optimizer).__name__
                raise ConfigError(f"{kind} updates full matrices on their owner ranks, which is not planned yet")
            untested, cpu = config.zero_allow_untested_optimizer, torch.device("cpu")
            check_optimizer(self._optimizer, sharded=sharded, allow_untested=untested, device=cpu)
            if native := [acc for acc in built.grads if acc.flat.placement.native]:
                check_native(self._optimizer, scaled=native[0].flat.placement.scaled)
            self._owned = ShardedGroups(self._optimizer).take(built.grads)
        settings = HostAdamSettings.of(config, built.placements.host, clips=config.gradient_clipping > 0)
        self._scaled = [moment for acc in built.grads if acc.flat.placement.scaled for moment in moments_of(acc.flat)]
        native = [acc for acc in built.grads if acc.flat.placement.native and not acc.flat.placement.scaled]
        slices = {acc: [owned for owned in self._owned if owned.acc is acc] for acc in native}
        self._native = [HostState(acc, slices[acc], settings.moments_dtype) for acc in native if slices[acc]]
        delayed = settings.delay_from is not None
        self.early = settings.early and not delayed and any(s.staging is not None for s in self._native)
        self.lent_bytes = 0  # gradients on the device that a delayed update reads beside those of the next step
        for state in self._native:
            may_be_early = settings.early and not delayed and state.staging is not None
            staged = must_stage(state.flat) or delayed or may_be_early
            make_writer(state.flat, settings.host, staged=staged)
            if delayed:
                lent, _ = state.grads.lend(_Reader(), swap=True)
                self.lent_bytes += 0 if state.grads.on_host else lent.nbytes

    def update(self) -> None:
        """One step of the torch optimizer on the shards that it updates, as ShardedOptimizer calls it."""
        if self._optimizer is None:
            return
        everything = {flat: [True] * len(flat.flat.params) for flat in self._built.grads}
        for group in sub_groups(self._optimizer, self._owned, everything):
            give_gradients(group)
            self._optimizer.step()
            drop_gradients(group)

    @property
    def state_bytes(self) -> int:
        """The bytes that ShardedOptimizer.state_bytes() would count."""
        held = 0
        if self._optimizer is not None:
            values = [value for state in self._optimizer.state.values() for value in state.values()]
            held = sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
        moments = [*self._scaled, *(moment for state in self._native for moment in state.moments)]
        return held + sum(moment.nbytes for moment in moments)

    @property
    def staged_bytes(self) -> int:
        """States on disk that a backward writes beside those of the step before."""
        return sum(shard.nbytes for state in self._native for shard in (state.master, *state.moments))


def _optimizer_of(block: Mapping[str, Any] | None, params: Iterable[Any], *, on_host: bool) -> torch.optim.Optimizer:
    if block is None:
        # Trainer's default is fused on GPUs, which makes no copies; neither does the plain loop that meta tensors get.
        return torch.optim.AdamW(params)
    kind, arguments = optimizer_of(block, nn.Module())
    # On GPUs torch updates all tensors together, through a copy of them; meta tensors need foreach=True for that.
    stays = on_host or "fused" in arguments or "foreach" not in inspect.signature(kind).parameters
    together = {} if stays else {"foreach": True}
    arguments.pop("fused", None)
    made: torch.optim.Optimizer = kind(params, **{**together, **arguments})
    return made
