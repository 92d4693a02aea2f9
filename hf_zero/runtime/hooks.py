"""Everything that an engine puts on its model: hooks, guards, marks and attributes. It comes off and goes on again.

[Note: When a unit is resharded in backward]
Its module's inputs have their gradient when nothing in the module is left to run: autograd runs ready nodes
latest-made first, and everything in the module was made after its inputs. Modules whose inputs need no gradient stay
gathered until the end of backward.

The tensor between two calls of one module in a row is the output of the first and the input of the second: its
gradient enters the backward of the first call, then leaves that of the second. So a unit is resharded when the last
call that was entered is left (`BackwardCalls`).

[Note: Recomputation]
Activation checkpointing runs forwards inside backward, and may leave them by an exception as soon as it has what it
needs. So inside backward a forward hook unshards (again: nothing to do where it is so) and never reshards. What it
returns is watched as in a forward: several calls of one unit may be recomputed before the backward of any of them.

[Note: Double backward]
With create_graph=True the nodes of the second backward read weights that the first one saved, and run before any hook
on an output. So a backward that builds a graph reshards nothing until a backward that builds none, or a step, is over.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils.hooks import RemovableHandle

from hf_zero.runtime.arriving_grads import ArrivingGrads
from hf_zero.runtime.autocast import AutocastCopies
from hf_zero.runtime.autograd_graph import SavedViews
from hf_zero.runtime.backward_entry import BackwardEntries, Call
from hf_zero.runtime.backward_watch import BackwardWatch, PassEvents, in_backward, in_transform
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.guards import DeepCopy, ModelGuards, ModelTree
from hf_zero.runtime.loss_scale import LossScale
from hf_zero.runtime.nested import map_tensors, tensors_in
from hf_zero.runtime.outside_access import OutsideReads
from hf_zero.runtime.param_grads import ParamGrads
from hf_zero.runtime.state_dicts import hook_state_dicts
from hf_zero.runtime.unit_pass import Phase
from hf_zero.runtime.unshard import OnDemandParams
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.sharded_param import asks_nobody
from hf_zero.sharding.unit import ShardUnit, UnitKind, UnitState

# The marks of a sharded model that generates: for the first, transformers runs generate on all ranks in step.
# torch.compile refuses a module with it, unless it has the second. Other modules have none: transformers would run
# every layer of LayerDrop there.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_FLATTEN = "flatten_parameters"


class BackwardCalls:
    """The calls of one unit's module that the backward has entered and not left.

    Calls whose inputs need no gradient are never left; the end of the backward forgets them.
    """

    def __init__(self, unit: ShardUnit) -> None:
        self._unit = unit
        self._forwards: list[Call] = []  # under way, the innermost last: a module may call itself
        self._entered: set[Call] = set()

    def begin(self) -> Call:
        """A forward starts."""
        self._forwards.append(Call(self._unit))
        return self._forwards[-1]

    def end(self) -> Call | None:
        """The innermost forward is over, by an exception too (of a hook before ours, then it never began)."""
        return self._forwards.pop() if self._forwards else None

    def enter(self, call: Call) -> None:
        self._entered.add(call)

    def leave(self, call: Call) -> bool:
        """Whether no other call is in backward."""
        self._entered.discard(call)
        return not self._entered

    def forget(self) -> None:
        self._entered.clear()


class ModelHooks:
    """All hooks of one engine on one model."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._takers: list[tuple[nn.Parameter, int]] = []  # whose gradients are taken, by which hook
        self._reads: OutsideReads | None = None
        self._entries: BackwardEntries | None = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._takers.clear()
        if self._reads is not None:
            self._reads.remove()
        if self._entries is not None:
            self._entries.remove()

    # ---------------------------------------------------------------- gradients
    def on_gradients(self, params: Sequence[nn.Parameter], arriving: ArrivingGrads, watch: BackwardWatch) -> None:
        """Let `arriving` have gradients whenever autograd has added to the `.grad` of `params`; they go there."""
        arriving.watch = weakref.ref(watch)
        for index, param in enumerate(params):
            handle = param.register_post_accumulate_grad_hook(arriving.hook(index))
            self._handles.append(handle)
            self._takers.append((param, handle.id))

    @asks_nobody
    def _take_last(self) -> None:
        """Move our hooks, which take `param.grad` away, behind others that were registered since and may edit it."""
        for param, mine in self._takers:
            hooks = param._post_accumulate_grad_hooks
            if len(hooks) > 1 and next(reversed(hooks)) != mine:
                hooks[mine] = hooks.pop(mine)  # C++ reads them in the order of insertion

    def before_gradient(self, param: nn.Parameter, shown: ParamGrads) -> None:
        """Hide what `shown` shows before autograd adds to `param.grad`."""
        mine, place = weakref.ref(shown), shown.place

        def hook(grad: torch.Tensor) -> None:
            if place.is_used and (owner := mine()) is not None:
                owner.hide()

        self._handles.append(param.register_hook(hook))

    # ---------------------------------------------------------------- the whole model
    def on_model(
        self, model: nn.Module, watch: BackwardWatch, input_dtype: torch.dtype | None, loss_scale: LossScale
    ) -> None:
        """Watch what the model returns, scale the gradients that enter there (see loss_scale.py), and cast floating
        inputs to `input_dtype` where parameters were cast to it."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(input_dtype) if tensor.is_floating_point() else tensor

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return map_tensors(args, cast), map_tensors(kwargs, cast)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if not torch.is_grad_enabled() or in_backward():
                return None
            if loss_scale.is_used:
                output = loss_scale.through_outputs(output)
            watch.watch(output)
            return output

        def unscale(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not loss_scale.is_used or not torch.is_grad_enabled() or in_backward():
                return None
            return loss_scale.through_inputs(args), loss_scale.through_inputs(kwargs)

        if input_dtype is not None:
            self._handles.append(model.register_forward_pre_hook(_eager(before), prepend=True, with_kwargs=True))
        self._handles.append(model.register_forward_pre_hook(_eager(unscale), prepend=True, with_kwargs=True))
        self._handles.append(model.register_forward_hook(_eager(after)))

    def on_autocast(self, model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        """Run the model's forward under torch.autocast."""
        active: list[torch.autocast] = []

        def before(module: nn.Module, args: Any) -> None:
            active.append(torch.autocast(device_type, dtype))
            active[-1].__enter__()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if active:  # not if a hook before ours has failed
                active.pop().__exit__(None, None, None)

        self._handles.append(model.register_forward_pre_hook(_eager(before)))
        self._handles.append(model.register_forward_hook(_eager(after), always_call=True))

    def on_forward(self, model: nn.Module, starts: Callable[[], None]) -> None:
        """Call `starts` before the model's forward, before anything else."""

        def before(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self._take_last()
            starts()

        self._handles.append(model.register_forward_pre_hook(_eager(before), prepend=True))

    def on_state_dict(self, model: nn.Module, units: Iterable[ShardUnit], events: PassEvents) -> None:
        """See hook_state_dicts."""
        self._handles += hook_state_dicts(model, units, events.check_current)

    # ---------------------------------------------------------------- units that are gathered on demand
    def on_layer(self, unit: ShardUnit, params: OnDemandParams, watch: BackwardWatch, device_type: str) -> None:
        """Gather a layer unit around the forward and the backward of its module."""
        casts = AutocastCopies(unit, device_type)
        calls = BackwardCalls(unit)
        views = SavedViews(unit)
        entries = self._watch_entries(params)
        watch.at_end(calls.forget)

        def enter_backward(call: Call, recomputed: bool, grad: torch.Tensor) -> None:
            if not recomputed:  # else the hook may belong to a backward inside the outermost one
                watch.started()
                params.builds_graph |= torch.is_grad_enabled()  # [Note: Double backward]
            calls.enter(call)
            params.before_use(unit, Phase.BACKWARD)
            if call.saved and not torch._C._autograd._get_current_graph_task_keep_graph():
                views.release(call.saved)
                call.saved = []

        def leave_backward(call: Call, grad: torch.Tensor) -> None:
            if calls.leave(call):
                params.after_use(unit)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            call = calls.begin()
            phase = Phase.BACKWARD if in_backward() else Phase.FORWARD
            with temporarily_clear_interpreter_stack():  # a gather is no part of torch.vmap or torch.func
                params.before_use(unit, phase)
            if torch.is_grad_enabled() and in_transform():
                params.hold(unit)  # hooks here see tensors of the transform, not those of the backward
            elif torch.is_grad_enabled():
                # This is done inside backward too: the inputs of a reentrant recomputation end its nested backward.
                for tensor in tensors_in((args, kwargs)):
                    # A parameter lives on: its hooks would pile up with every forward.
                    if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                        tensor.register_hook(functools.partial(leave_backward, call))
            casts.enter()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            casts.leave()
            call = calls.end()
            if call is not None and torch.is_grad_enabled() and not in_transform():
                recomputed = in_backward()
                enter = functools.partial(enter_backward, call, recomputed)
                for tensor in call.over(output):  # none after an exception
                    tensor.register_hook(enter)
                if not recomputed:
                    call.saved = views.note(output, call.first)
                    entries.add(call)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():  # [Note: Recomputation]
                params.after_use(unit)

        self._handles.append(unit.module.register_forward_pre_hook(_eager(before), prepend=True, with_kwargs=True))
        self._handles.append(unit.module.register_forward_hook(_eager(leave), always_call=True))
        self._handles.append(unit.module.register_forward_hook(_eager(after)))

    def _watch_entries(self, params: OnDemandParams) -> BackwardEntries:
        if self._entries is None:
            self._entries = BackwardEntries(params.enter)
        return self._entries

    def on_root(self, unit: ShardUnit, params: OnDemandParams, watch: BackwardWatch) -> None:
        """Gather the root unit for the whole forward, and with gradients until the end of backward.

        The model itself is not always what is called (`model.generate` of a wrapped model, an encoder alone), so every
        module that owns root parameters or holds units opens the same scope; the outermost one closes it.
        """
        scope: list[nn.Module] = []
        reads = self._reads = OutsideReads(unit.module, params)
        watch.at_end(reads.close)

        def before(module: nn.Module, args: Any) -> None:
            inside = in_backward()
            with temporarily_clear_interpreter_stack():
                params.before_use(unit, Phase.BACKWARD if inside else Phase.FORWARD)
            if not inside and not scope and unit.state is not UnitState.SAVING:
                scope.append(module)
                params.begin_forward(module)
                reads.open()

        def finish(module: nn.Module, args: Any, output: Any) -> None:
            if scope and scope[0] is module and not in_backward():
                with temporarily_clear_interpreter_stack():
                    params.end_forward()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward() or not scope or scope[0] is not module:
                return
            scope.clear()
            params.reshard_idle()
            if torch.is_grad_enabled() and (in_transform() or any(one.requires_grad for one in tensors_in(output))):
                params.hold(unit)
                reached = params.end_of_forward()
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(reached)
                if module is not unit.module:  # which on_model watches
                    watch.watch(output)
            else:
                reads.close()
            params.after_use(unit)

        for module in root_modules(unit, params.units):
            self._handles.append(module.register_forward_pre_hook(_eager(before), prepend=True))
            self._handles.append(module.register_forward_hook(_eager(finish)))
            self._handles.append(module.register_forward_hook(_eager(after), always_call=True))


@dataclass(frozen=True)
class ComputeTypes:
    """The types in which a model computes."""

    input_dtype: torch.dtype | None  # floating inputs are cast to it
    autocast: torch.dtype | None  # the forward runs under torch.autocast with it
    loss_scale: LossScale


@dataclass(frozen=True)
class ModelContext:
    """A model and what its engine made of it."""

    model: nn.Module
    units: list[ShardUnit]
    params: OnDemandParams
    grads: list[GradAccumulator]
    param_grads: ParamGrads
    device: torch.device
    rank: int
    types: ComputeTypes


class ModelAttachment:
    """Put on at construction; `uninstall` removes all of it.

    Args:
        deepcopy: Copies the model, or a module in it.
        attributes: What the model itself gets, by name.
    """

    def __init__(
        self, context: ModelContext, events: PassEvents, deepcopy: DeepCopy, attributes: dict[str, Any]
    ) -> None:
        self._model = context.model
        self._tree: ModelTree | None = None
        self._rank = context.rank
        self._attributes = attributes
        self._hooks = ModelHooks()
        self._guards = ModelGuards(context.model, context.units, deepcopy)
        self._events = events
        self._watch = BackwardWatch(events)
        self._param_grads = context.param_grads
        self._hook(context)
        context.model.__dict__.update(attributes)
        self._tree = ModelTree(context.model, context.units)
        for module in context.model.modules():
            if isinstance(module, nn.RNNBase):
                # On CUDA it moves the weights into memory of its own, where no update would find them.
                module.__dict__[_FLATTEN] = _stay
        if any(unit.on_demand for unit in context.units):
            for module in context.model.modules():
                if hasattr(module, "generate"):
                    module.__dict__.update(dict.fromkeys(_MARKS, True))

    def _hook(self, context: ModelContext) -> None:
        watch, types = self._watch, context.types
        self._hooks.on_state_dict(context.model, context.units, self._events)
        self.on_gradients(context.grads)
        self._hooks.on_forward(context.model, self._begin_forward)
        self._hooks.on_model(context.model, watch, types.input_dtype, types.loss_scale)
        if types.autocast is not None:
            self._hooks.on_autocast(context.model, context.device.type, types.autocast)
        if not any(unit.on_demand for unit in context.units):
            return
        for unit in context.units:
            if unit.kind is UnitKind.ROOT:  # a pass begins and ends there, whether it owns parameters or not
                self._hooks.on_root(unit, context.params, watch)
            elif unit.on_demand:
                self._hooks.on_layer(unit, context.params, watch, context.device.type)

    def _begin_forward(self) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self.check_model()
        self._events.begin_forward()

    def check_model(self) -> None:
        """Raise StateError if parameters of the model are not those that the engine trains and saves."""
        if self._tree is not None:
            self._tree.check(self._rank)

    def check_names(self) -> None:
        """Raise StateError if parameters of the model have other names than the engine knows them by."""
        if self._tree is not None:
            self._tree.check_names(self._rank)

    def on_gradients(self, accumulators: Iterable[GradAccumulator]) -> None:
        """Let the accumulators have the gradients of their parameters."""
        for acc in accumulators:
            self._hooks.on_gradients(acc.flat.params, acc, self._watch)
            if acc.flat.layout.world_size == 1:  # the mean itself may be in param.grad
                for param in acc.flat.params:
                    self._hooks.before_gradient(param, self._param_grads)

    def uninstall(self) -> None:
        self._hooks.remove()
        self._guards.remove()
        for module in self._model.modules():
            for name in (*_MARKS, _FLATTEN):
                module.__dict__.pop(name, None)
        for name in self._attributes:
            self._model.__dict__.pop(name, None)


def _stay() -> None:
    """Do nothing, instead of nn.RNNBase.flatten_parameters."""


def root_modules(unit: ShardUnit, units: Iterable[ShardUnit]) -> list[nn.Module]:
    """The model, and every module below it that owns parameters of its root unit or holds one of `units`.

    Of these only what can be called itself.
    """
    if unit.kind is not UnitKind.ROOT:
        raise AssertionError(f"{unit.name} is not a root unit")
    mine = ParamIndex([unit])
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    heads = {id(one.module) for one in units if one is not unit}
    paths = [path for path, module in unit.module.named_modules(remove_duplicate=False) if id(module) in heads]
    above = {path[:end] for path in paths for end, sign in enumerate(path) if sign == "."}
    found = [unit.module]
    for path, module in unit.module.named_modules():
        owns = any(param in mine for param in module.parameters(recurse=False))
        if (owns or path in above) and module is not unit.module and not isinstance(module, containers):
            found.append(module)
    return found


def _eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of a hook: it breaks the graph at a unit's border and compiles inside of units."""
    disabled: Callable[..., Any] = torch.compiler.disable(hook)
    return disabled
