"""One forward and backward of a model on the meta device: what it keeps, and when it uses which unit.

The hooks are the engine's own, so units are used, left, and their gradients handed over exactly when a training would.
Nothing is computed: every operation gives sizes only, and the bytes behind what it returns are counted as they live.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_zero.config import OffloadOptimizer, OffloadParam, ResolvedConfig
from hf_zero.config.resolved import ActivationCheckpointing, Fp8Section
from hf_zero.extras.activations import regions
from hf_zero.extras.activations.budget import Choice
from hf_zero.extras.estimate.flops import FlopCounter
from hf_zero.extras.estimate.pretend import PretendedComm, PretendedPlacements
from hf_zero.extras.estimate.saved_inputs_plan import PlannedCheckpointing, SavedInputsPlan, choices_of
from hf_zero.extras.estimate.tracker import StorageTracker
from hf_zero.runtime.arriving_grads import ArrivingGrads
from hf_zero.runtime.backward_watch import BackwardWatch, PassEvents
from hf_zero.runtime.build import make_units
from hf_zero.runtime.hooks import ModelHooks
from hf_zero.runtime.loss_scale import LossScale
from hf_zero.runtime.prefetch import PrefetchLimits
from hf_zero.runtime.step_events import StepEvents
from hf_zero.runtime.unit_pass import Phase
from hf_zero.runtime.unit_specs import BuildSettings, flat_param_specs, torch_dtype
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.unit import ShardUnit, UnitKind


@dataclass(frozen=True)
class Event:
    """A call that a training makes at this point, and the activations around it."""

    call: str  # a method of OnDemandParams, or "gradient"
    unit: str  # name of the unit, "" for calls about all of them
    phase: Phase | None
    param: str  # of a gradient: name of the parameter
    dtype: torch.dtype | None  # of a gradient
    peak: int  # most bytes of activations since the event before
    live: int  # bytes of activations now


@dataclass(frozen=True)
class Profile:
    """The memory of a micro-batch beside parameters and the engine's gradients, and its operations."""

    events: tuple[Event, ...]
    batch: str  # shapes, for people
    saved: int  # bytes of activations between forward and backward
    peak: int  # most bytes of activations, gradients on their way to the engine included
    forward_flops: int = 0  # of matrix products, and of attention
    backward_flops: int = 0
    inputs: SavedInputsPlan | None = None  # what the activation_checkpointing block does; None: it is not on


class _SeenGrads(ArrivingGrads):
    """Records gradients, and keeps none."""

    def __init__(self, flat: FlatParam, recorder: _Recorder) -> None:
        super().__init__(flat.params)
        self._slots = flat.layout.slots
        self._recorder = recorder

    def take(self, grads: Mapping[int, torch.Tensor]) -> None:
        """See ArrivingGrads.take."""
        for index, grad in grads.items():
            self._recorder.record("gradient", param=self._slots[index].name, dtype=grad.dtype)


class _Recorder(OnDemandParams, PassEvents):
    """Records the calls it gets, and leaves every unit unsharded."""

    def __init__(self, units: list[ShardUnit], tracker: StorageTracker) -> None:
        super().__init__(units, PrefetchLimits(0, 0), StepEvents(), lambda values, what: list(values))
        self.events: list[Event] = []
        self._tracker = tracker
        self._arriving = {
            flat: _SeenGrads(flat, self) for unit in units for flat in unit.flats if flat.layout.trainable
        }

    def record(
        self,
        call: str,
        unit: ShardUnit | None = None,
        phase: Phase | None = None,
        *,
        param: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Note a call, and the activations around it."""
        peak = self._tracker.restart_peak()
        name = unit.name if unit is not None else ""
        self.events.append(Event(call, name, phase, param, dtype, peak, self._tracker.live))

    def watch_gradients(self, hooks: ModelHooks, watch: BackwardWatch) -> None:
        """Record them from now on."""
        for flat, arriving in self._arriving.items():
            hooks.on_gradients(flat.params, arriving, watch)

    def before_use(self, unit: ShardUnit, phase: Phase) -> None:
        self.record("before_use", unit, phase)

    def after_use(self, unit: ShardUnit) -> None:
        for flat in unit.flats:  # its reduce starts when backward has left it
            if flat in self._arriving:
                self._arriving[flat].take_waiting()
        self.record("after_use", unit)

    def unshard(self, unit: ShardUnit, *, wait: bool = True, exact: bool = False) -> None:
        self.record("unshard", unit)

    def hold(self, unit: ShardUnit) -> None:
        self.record("hold", unit)

    def begin_forward(self, module: nn.Module | None = None) -> None:
        self.record("begin_forward")

    def end_forward(self) -> None:
        self.record("end_forward")

    def reshard_idle(self) -> None:
        self.record("reshard_idle")

    def begin_backward(self) -> None:
        self.record("begin_backward")

    def end_backward(self) -> None:
        for arriving in self._arriving.values():
            arriving.end_backward()
        self.record("end_backward")


class _Assumptions(TorchFunctionMode):
    """Answers for values that are not there: `all()` holds and `any()` does not, as without padding or packing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.all, torch.all, torch.Tensor.any, torch.any) and len(args) == 1 and not kwargs:
            return torch.tensor(func in (torch.Tensor.all, torch.all))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _fused_attention(*, on_host: bool) -> Iterator[None]:
    """Inside, attention keeps its inputs, its output and one number per row, as the fused kernels do.

    On the meta device torch takes the plain formula, which keeps every score. Dropout has no fused kernel on the CPU.
    The function is replaced where models look it up: a mode of torch is not in force inside a backward, where
    checkpointing recomputes.
    """
    plain = torch.nn.functional.scaled_dot_product_attention

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dropout = kwargs.get("dropout_p", args[3] if len(args) > 3 else 0.0)
        mask = kwargs.get("attn_mask", args[2] if len(args) > 2 else None)
        learned = mask is not None and mask.requires_grad  # as T5's position biases: no fused kernel gives a gradient
        if query.is_meta and query.dim() == 4 and not learned and not (on_host and dropout):
            return _attend(query, *args, **kwargs)
        return plain(query, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = plain


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa and key.shape[1] != query.shape[1]:
        # The kernels read one head several times; an expanded view has the right shape and no memory of its own.
        groups = query.shape[1] // key.shape[1]
        key, value = (
            one.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) if one.is_meta else one
            for one in (key, value)
        )
    mask = attn_mask if attn_mask is None or attn_mask.dtype != torch.bool else None
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal and mask is None, attn_mask=mask, scale=scale
    )[0]
    assert isinstance(output, torch.Tensor)
    return output


def measure(model: nn.Module, config: ResolvedConfig, batch: Mapping[str, torch.Tensor], *, on_host: bool) -> Profile:
    """Run forward and backward of `model`, on the meta device, in training mode; it is left as it was.

    Args:
        config: Decides the parameters' types and what is a unit; stage and offload change nothing here.
        batch: Meta tensors; the model must return something with a `loss`, a dict with "loss", or the loss.
    Raises:
        Exception: What the model raises where it needs values, and has only sizes.
    """
    zero = dataclasses.replace(
        config.zero,
        stage=3,
        stage3_param_persistence_threshold=0,
        offload_param=OffloadParam(),
        offload_optimizer=OffloadOptimizer(),
    )
    settings = BuildSettings.of(dataclasses.replace(config, stage=3, zero=zero, fp8=Fp8Section()))
    comm = PretendedComm(0, 2, on_host=on_host)
    with _untouched(model):
        built = make_units(
            flat_param_specs(model, settings, comm),
            settings,
            comm,
            FlatParam.initialize_from_params,
            PretendedPlacements,
        )
        for unit in built.units:
            if unit.on_demand:
                unit.unshard()
                unit.wait_for_unshard()

        def run() -> Profile:
            tracker = StorageTracker()
            tracker.ignore(tensor for tensor in [*model.parameters(), *model.buffers(), *batch.values()])
            recorder = _Recorder(built.units, tracker)
            with _recording(model, built.units, recorder, torch_dtype(config.dtype)):
                return _run(model, batch, recorder, tracker, on_host=on_host)

        return _with_block(config.activation_checkpointing, run, on_host=on_host)


def _with_block(settings: ActivationCheckpointing, run: Callable[[], Profile], *, on_host: bool) -> Profile:
    """`run` as in a training with these settings; where they have a budget, the second run is as the second step."""
    if not settings.is_on:
        return run()

    def inside(choices: Sequence[Choice] | None) -> tuple[Profile, PlannedCheckpointing]:
        plan = PlannedCheckpointing(settings, on_host=on_host, choices=choices)
        end = regions.watch(plan.hooks_of)
        try:
            return run(), plan
        finally:
            end()

    profile, plan = inside(None)
    said: tuple[str, ...] = ()
    if settings.activation_memory is not None and (sizes := plan.region_sizes()):
        choices, line = choices_of(sizes, settings.activation_memory, on_host=on_host)
        said = (line,)
        if choices is not None:
            profile, plan = inside(choices)
    result = plan.result()
    return dataclasses.replace(profile, inputs=dataclasses.replace(result, notes=said + result.notes))


def _run(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    recorder: _Recorder,
    tracker: StorageTracker,
    *,
    on_host: bool,
) -> Profile:
    counter = FlopCounter()
    with tracker, counter, _Assumptions(), _fused_attention(on_host=on_host), torch.enable_grad():
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        del output  # as a training loop does: the logits are not needed for the backward
        saved = tracker.live
        recorder.record("between")
        forward = counter.total
        loss.backward()
        del loss
        recorder.record("over")
    peak = max((event.peak for event in recorder.events), default=0)
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
    return Profile(tuple(recorder.events), shapes, saved, peak, forward, counter.total - forward)


@contextlib.contextmanager
def _recording(
    model: nn.Module, units: list[ShardUnit], recorder: _Recorder, dtype: torch.dtype | None
) -> Iterator[None]:
    """Put the engine's hooks on `model`, with the recorder instead of the engine."""
    hooks = ModelHooks()
    watch = BackwardWatch(recorder)
    hooks.on_model(model, watch, dtype, LossScale())
    for unit in units:
        if unit.on_demand and unit.kind is UnitKind.ROOT:
            hooks.on_root(unit, recorder, watch)
        elif unit.on_demand:
            hooks.on_layer(unit, recorder, watch, "cpu")  # a device for autocast, which is off
    recorder.watch_gradients(hooks, watch)
    try:
        yield
    finally:
        hooks.remove()


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Restore the data of the parameters, and drop their gradients."""
    kept = [(param, param.data) for param in model.parameters()]
    try:
        yield
    finally:
        for param, data in kept:
            param.data = data
            param.grad = None
