"""The parts of a causal language model of transformers: embeddings, decoder layers, head.

[Note: Shells] The work that a model does around its layers (positions, masks, rotary embeddings, scaling) belongs to
its own forward and differs from model to model. It is not written again here: a shell is a copy of the model with
stand-ins instead of its layers, and the model's forward is run on it.
- Before the layers, the forward runs until it calls the first stand-in, which gets the hidden states.
- A layer gets the same further arguments (mask, positions, ...) that the stand-ins were called with in a run on hidden
  states. Modules with weights are left out of that run.
- After the layers, the stand-ins return the result of the last layer.
Hidden states go from layer to layer beside the attention mask and position ids of the batch, which do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from hf_zero.errors import ConfigError

# Hidden states (batch, tokens, width), and the mask and position ids of the batch or None.
Flow = tuple[torch.Tensor, Any, Any]


@dataclass(frozen=True)
class LayerCall:
    """The arguments with which a forward called a layer."""

    hidden: torch.Tensor
    args: tuple[Any, ...]  # after the hidden states
    kwargs: dict[str, Any]


class _Reached(Exception):
    """Ends a forward at its first layer."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class _StandIn(nn.Module):
    """Replaces a decoder layer in a shell."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.index = index
        self.on_call: Callable[[int, LayerCall], Any] = _unused
        # Forwards read plain attributes of their layers, such as attention_type.
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)}
        self.__dict__.update({name: value for name, value in plain.items() if name not in self.__dict__})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args:
            args = (kwargs.pop("hidden_states"),)
        return self.on_call(self.index, LayerCall(args[0], args[1:], kwargs))


def _unused(index: int, call: LayerCall) -> Any:
    raise AssertionError("a stand-in was called outside of a shell's run")


class _LeftOut(nn.Module):
    """Replaces a module whose result does not matter: hidden states pass, all else becomes a zero."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.dim() >= 3:
                return tensor
        return torch.zeros((), device=tensors[0].device if tensors else None)


class Anatomy:
    """The modules of a model before its layers, its layers, and the modules after them, by transformers' plan.

    The plan is `base_model_pp_plan` of the configuration class and `_pp_plan` of the class with the head.

    Raises:
        ConfigError: The model cannot be split; the message says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = type(model).__name__
        self.model = model
        self.layers_path, self.front, self.tail = self._read_plan()
        self.layers: list[nn.Module] = list(model.get_submodule(self.layers_path).children())
        if getattr(model.config, "output_router_logits", False):
            raise self.refused("output_router_logits adds a loss of its routers; set it to false")
        planned = tuple(f"{path}." for path in (*self.front, *self.tail, self.layers_path))
        for name, _ in model.named_parameters(remove_duplicate=False):
            if not name.startswith(planned):
                raise self.refused(f"the parameter {name} belongs to none of the modules of its plan {[*planned]}")

    def _read_plan(self) -> tuple[str, list[str], list[str]]:
        """The path of the list of layers, and the paths of the modules before and after it."""
        plan, modules = list(self.model._pp_plan or {}), dict(self.model.named_modules())
        lists = [path for path in plan if isinstance(modules.get(path), nn.ModuleList)]
        if len(lists) != 1:
            config = type(self.model.config).__name__
            raise self.refused(f"transformers' {config} has no base_model_pp_plan that names its layers")
        if self.model.base_model is self.model or self.model.get_output_embeddings() is None:
            raise self.refused("it has no head over a base model (expected a ...ForCausalLM)")
        inside = [path for path in plan if path.startswith(f"{self.model.base_model_prefix}.")]
        layers = inside.index(lists[0])
        return lists[0], inside[:layers], [*inside[layers + 1 :], *(path for path in plan if path not in inside)]

    def refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"from_transformers: {self.name} cannot be split into stages: {why}.\nWrite it as a list of layers, "
            "hf_zero.PipelineModule([...]): docs/pipeline.md has an example."
        )

    def shell(self, *, without_weights: bool = False) -> Any:
        """A copy of the model with stand-ins, which shares its tensors; or has parameters on the meta device."""
        memo: dict[int, Any] = {id(self.model.config): self.model.config}
        for index, layer in enumerate(self.layers):
            memo[id(layer)] = _StandIn(layer, index)
        for param in self.model.parameters():
            memo[id(param)] = param.detach().to("meta") if without_weights else param
        for buffer in self.model.buffers():
            memo[id(buffer)] = buffer
        return copy.deepcopy(self.model, memo)


def run_shell(shell: Any, on_call: Callable[[int, LayerCall], Any], **inputs: Any) -> Any:
    """A forward of a shell, or of its base model, without a cache."""
    for module in shell.modules():
        if isinstance(module, _StandIn):
            module.on_call = on_call
    given = {name: value for name, value in inputs.items() if value is not None}
    return shell(**given, use_cache=False)


def _has(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class _Part(nn.Module):
    """Modules of a shell under the names that they have in the model, so that they move and train with the rest."""

    def __init__(self, shell: Any, paths: Sequence[str]) -> None:
        super().__init__()
        for path in paths:
            *parents, last = path.split(".")
            place: nn.Module = self
            for name in parents:
                if name not in place._modules:
                    place.add_module(name, nn.Module())
                place = place.get_submodule(name)
            place.add_module(last, shell.get_submodule(path))
        own = {id(module) for module in self.modules()}
        self._shell = [shell]  # in a list: no submodule
        self._others = [[module for module in shell.modules() if id(module) not in own]]

    def ready_shell(self, device: torch.device) -> Any:
        """The shell in this part's mode, with its buffers on the device."""
        for module in self._others[0]:
            module.training = self.training
        _move_buffers(self._shell[0], device)
        return self._shell[0]


class Embeddings(_Part):
    """Computes the hidden states of the first layer from token ids."""

    def __init__(self, anatomy: Anatomy) -> None:
        shell = anatomy.shell()
        leave_out(shell, [path for path in anatomy.tail if path not in anatomy.front])
        super().__init__(shell, anatomy.front)

    def forward(self, inputs: Any) -> Flow:
        """
        Args:
            inputs: Token ids (batch, tokens); or (ids, attention mask, position ids), of which the last may be left
                out or None; or a mapping with "input_ids", "attention_mask", "position_ids".
        """
        ids, mask, positions = _batch(inputs)

        def on_call(index: int, call: LayerCall) -> Any:
            raise _Reached(call.hidden)

        base = self.ready_shell(ids.device).base_model
        try:
            run_shell(base, on_call, input_ids=ids, attention_mask=mask, position_ids=positions)
        except _Reached as reached:
            return reached.hidden, mask, positions
        raise AssertionError("a forward ended without its layers")


class LayerCalls:
    """Finds how a model calls its layers, for the mask and positions of a batch.

    The last answer is kept, as layers run in a row. One object serves all layers of a model on a rank, and has no
    weights.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self._shell = anatomy.shell(without_weights=True)
        leave_out(self._shell, [*anatomy.front, *anatomy.tail])
        self._key: tuple[Any, ...] = ()
        self._batch: tuple[Any, Any] = (None, None)
        self._calls: list[LayerCall] = []
        self._check(anatomy)

    def _check(self, anatomy: Anatomy) -> None:
        """Raise if the model does not call each layer once, or gives it more of the tokens than hidden states.

        Inputs that need a gradient show in the arguments of a layer whether these were computed from the tokens.
        """
        width = anatomy.model.config.get_text_config().hidden_size
        embeds = torch.zeros(2, 3, width, device="cpu", requires_grad=True)
        with torch.enable_grad():
            calls = self._run(embeds.clone(), None, None)
        if (times := len(calls)) != len(anatomy.layers):
            raise anatomy.refused(f"its forward calls layers {times} times, and it has {len(anatomy.layers)}")
        given = pytree.tree_leaves([(call.args, call.kwargs) for call in calls])
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in given):
            raise anatomy.refused("its layers take more of the tokens than the hidden states")

    def find(self, index: int, flow: Flow, *, training: bool) -> LayerCall:
        """The arguments that layer `index` gets beside its hidden states."""
        hidden, mask, positions = flow
        key = (hidden.shape, hidden.dtype, hidden.device, training)
        if key != self._key or mask is not self._batch[0] or positions is not self._batch[1]:
            self._shell.train(training)
            with torch.no_grad():
                self._calls = self._run(torch.zeros_like(hidden), mask, positions)
            self._key, self._batch = key, (mask, positions)
        return self._calls[index]

    def _run(self, embeds: torch.Tensor, mask: Any, positions: Any) -> list[LayerCall]:
        calls: list[LayerCall] = []

        def on_call(index: int, call: LayerCall) -> Any:
            calls.append(LayerCall(torch.empty(0), call.args, call.kwargs))
            return call.hidden

        _move_buffers(self._shell, embeds.device)
        run_shell(self._shell.base_model, on_call, inputs_embeds=embeds, attention_mask=mask, position_ids=positions)
        return calls


class DecoderLayer(nn.Module):
    """A decoder layer of the model, called as the model calls it."""

    def __init__(self, anatomy: Anatomy, index: int, calls: LayerCalls) -> None:
        super().__init__()
        self.layer = anatomy.layers[index]
        self.layer_class = type(self.layer).__name__
        self._index = index
        self._calls = calls

    def forward(self, flow: Flow) -> Flow:
        hidden, mask, positions = flow
        call = self._calls.find(self._index, flow, training=self.training)
        return self.layer(hidden, *call.args, **call.kwargs), mask, positions


class Head(_Part):
    """Computes the logits from the hidden states of the last layer."""

    def __init__(self, anatomy: Anatomy) -> None:
        shell = anatomy.shell()
        leave_out(shell, [path for path in anatomy.front if path not in anatomy.tail])
        super().__init__(shell, anatomy.tail)

    def forward(self, flow: Flow) -> torch.Tensor:
        """Logits (batch, tokens, vocabulary)."""
        hidden, mask, positions = flow

        def on_call(index: int, call: LayerCall) -> Any:
            return hidden

        shell, embeds = self.ready_shell(hidden.device), torch.zeros_like(hidden, requires_grad=False)
        output = run_shell(shell, on_call, inputs_embeds=embeds, attention_mask=mask, position_ids=positions)
        logits: torch.Tensor = output.logits
        return logits


def leave_out(shell: Any, paths: Sequence[str]) -> None:
    """Replace modules with weights, and those that draw random numbers, by some that do nothing."""
    for path in paths:
        module = shell.get_submodule(path)
        if _has(module) or any(isinstance(one, nn.Dropout) for one in module.modules()):
            shell.set_submodule(path, _LeftOut())


def _move_buffers(shell: nn.Module, device: torch.device) -> None:
    for module in shell.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _batch(inputs: Any) -> tuple[torch.Tensor, Any, Any]:
    if isinstance(inputs, Mapping):
        ids, mask, positions = (inputs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    elif isinstance(inputs, tuple | list):
        ids, mask, positions = (*inputs, None, None)[:3]
    else:
        ids, mask, positions = inputs, None, None
    if not isinstance(ids, torch.Tensor):
        raise ConfigError(
            f"the inputs of this pipeline are {type(inputs).__name__} with {type(ids).__name__} for the token ids: "
            'expected a tensor, (ids, attention mask, position ids), or a mapping with "input_ids"'
        )
    return ids, mask, positions
