"""Ties the policies to a model's forward and backward. Everything here can be taken off again.

[Note: Who says that a backward is over]
Gradients of one parameter can arrive several times in one backward (reentrant checkpointing runs nested ones), so no
count of arrivals says that it is over. The end-of-backward callback does, and it must be queued in the outermost graph
task: from hooks on tensors that a forward outside of any backward returned. Where no such hook fires (a loss that was
built from something a module kept), the step flushes what has arrived.

[Note: When a unit is released in backward]
Its module's inputs have their gradient when nothing in the module is left to run: autograd runs ready nodes
latest-made first, and everything in the module was made after its inputs. Modules whose inputs need no gradient stay
gathered until the end of backward.

[Note: Recomputation]
Activation checkpointing runs forwards inside backward, and may leave them by an exception as soon as it has what it
needs. So inside backward a forward hook gathers (again: nothing to do if the unit is FULL) and never releases.

[Note: Double backward]
With create_graph=True the nodes of the second backward read weights that the first one saved, and run before any hook
on an output. So a backward that builds a graph releases nothing until a backward that builds none, or a step, is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_zero.runtime.autocast import AutocastCopies
from hf_zero.runtime.loss_scale import LossScale
from hf_zero.runtime.params import OnDemandParams, Phase
from hf_zero.runtime.reads import OutsideReads
from hf_zero.runtime.tree import map_tensors, tensors_in
from hf_zero.shards.partition import UnitKind
from hf_zero.shards.unit import ShardUnit


def in_backward() -> bool:
    """Whether this code runs inside an autograd backward."""
    return torch._C._current_graph_task_id() != -1


class BackwardWatch:
    """Calls `on_start` and `on_end` once in every outermost backward that goes through a watched tensor."""

    def __init__(self, on_start: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._on_start = on_start
        self._on_end = on_end
        self._also_at_end: list[Callable[[], None]] = []
        self._task = -1

    def at_end(self, call: Callable[[], None]) -> None:
        """Call `call` too when a backward is over."""
        self._also_at_end.append(call)

    def watch(self, output: Any) -> None:
        """Watch the tensors that a forward returned; call outside of any backward."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_grad)

    def started(self) -> None:
        """A hook that belongs to the outermost backward has fired."""
        task = torch._C._current_graph_task_id()
        if task != self._task and task != -1:
            self._task = task
            self._on_start()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _on_grad(self, grad: torch.Tensor) -> None:
        self.started()

    def _finish(self) -> None:
        self._task = -1
        self._on_end()
        for call in self._also_at_end:
            call()


class ModelHooks:
    """All hooks of one engine on one model."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._reads: OutsideReads | None = None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._reads is not None:
            self._reads.remove()

    # ---------------------------------------------------------------- gradients
    def on_gradient(self, param: nn.Parameter, arrived: Callable[[torch.Tensor], None]) -> None:
        """Call `arrived(grad)` whenever autograd has added to `param.grad`, and take the gradient away."""

        mine = weakref.ref(self)  # Python's collector does not see what autograd's hooks refer to

        def hook(leaf: torch.Tensor) -> None:
            grad, hooks = leaf.grad, mine()
            if grad is not None and hooks is not None:
                leaf.grad = None
                if hooks._reads is not None:
                    hooks._reads.check_gradient(leaf, grad)
                arrived(grad)

        self._handles.append(param.register_post_accumulate_grad_hook(hook))

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
            starts()

        self._handles.append(model.register_forward_pre_hook(_eager(before), prepend=True))

    def on_state_dict(self, model: nn.Module, check: Callable[[], None]) -> None:
        """Call `check` before `model.state_dict()`, and give its tensors a storage each, over the same memory.

        Whole parameters lie one behind the other in flat buffers, and safetensors and accelerate take tensors of one
        storage for tied: they would save the first of them only.
        """

        def after(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and not value.requires_grad and value.numel():
                    state[name] = torch.utils.dlpack.from_dlpack(value)

        def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            check()

        self._handles.append(model.register_state_dict_pre_hook(before))
        self._handles.append(model.register_state_dict_post_hook(after))

    # ---------------------------------------------------------------- units that are gathered on demand
    def on_layer(self, unit: ShardUnit, params: OnDemandParams, watch: BackwardWatch, device_type: str) -> None:
        """Gather a layer unit around the forward and the backward of its module."""

        casts = AutocastCopies(unit, device_type)

        def enter_backward(grad: torch.Tensor) -> None:
            watch.started()
            params.builds_graph |= torch.is_grad_enabled()  # [Note: Double backward]
            params.before_use(unit, Phase.BACKWARD)

        def leave_backward(grad: torch.Tensor) -> None:
            params.after_use(unit)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            params.before_use(unit, Phase.BACKWARD if in_backward() else Phase.FORWARD)
            if torch.is_grad_enabled():
                # Inside backward too: the inputs of a reentrant recomputation end its nested backward.
                for tensor in tensors_in((args, kwargs)):
                    # A parameter lives on: its hooks would pile up with every forward.
                    if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                        tensor.register_hook(leave_backward)
            casts.enter()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            casts.leave()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward():
                return  # [Note: Recomputation]
            if torch.is_grad_enabled():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(enter_backward)
            params.after_use(unit)

        self._handles.append(unit.module.register_forward_pre_hook(_eager(before), prepend=True, with_kwargs=True))
        self._handles.append(unit.module.register_forward_hook(_eager(leave), always_call=True))
        self._handles.append(unit.module.register_forward_hook(_eager(after)))

    def on_root(self, unit: ShardUnit, params: OnDemandParams, watch: BackwardWatch) -> None:
        """Gather the root unit for the whole forward, and with gradients until the end of backward.

        The model itself is not always what is called (`model.generate` of a wrapped model, an encoder alone), so every
        module that owns root parameters opens the same scope; the outermost one closes it.
        """
        scope: list[nn.Module] = []
        reads = self._reads = OutsideReads(unit.module, params)
        watch.at_end(reads.close)

        def before(module: nn.Module, args: Any) -> None:
            inside = in_backward()
            params.before_use(unit, Phase.BACKWARD if inside else Phase.FORWARD)
            if not inside and not scope:
                scope.append(module)
                params.begin_forward()
                reads.open()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward() or not scope or scope[0] is not module:
                return
            scope.clear()
            params.release_idle()
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(output)):
                params.hold(unit)
                if module is not unit.module:  # which on_model watches
                    watch.watch(output)
            else:
                reads.close()
            params.after_use(unit)

        for module in root_modules(unit):
            self._handles.append(module.register_forward_pre_hook(_eager(before), prepend=True))
            self._handles.append(module.register_forward_hook(_eager(after), always_call=True))


def root_modules(unit: ShardUnit) -> list[nn.Module]:
    """The model and every module below it that owns parameters of its root unit and is called itself."""
    if unit.kind is not UnitKind.ROOT:
        raise AssertionError(f"{unit.name} is not a root unit")
    mine = {id(param) for buffer in unit.buffers for param in buffer.params}
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    found = [unit.module]
    for module in unit.module.modules():
        owns = any(id(param) in mine for param in module.parameters(recurse=False))
        if owns and module is not unit.module and not isinstance(module, containers):
            found.append(module)
    return found


def _eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of a hook: it breaks the graph at a unit's border and compiles inside of units."""
    disabled: Callable[..., Any] = torch.compiler.disable(hook)
    return disabled
