"""A causal language model of transformers as a row of layers: embeddings, decoder layers, head.

[Note: Shells] What a model does around its layers (positions, masks, rotary embeddings, scaling, final norms) is its
own forward's matter, which differs from model to model. So it is not written again: a shell is a copy of the model
with stand-ins in the place of its layers, and the model's forward is run on it.
- Before the layers: the forward runs until it calls the first stand-in, which has the hidden states.
- A layer: what else the forward gives to each layer (mask, positions, ...) is what the stand-ins of a run on hidden
  states were called with. Modules with weights are left out of that run.
- After the layers: the stand-ins return what the last layer gave.
Hidden states go from layer to layer beside the attention mask and position ids of the batch, as they came.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """How a forward called a layer."""

    hidden: torch.Tensor
    args: tuple[Any, ...]  # after the hidden states
    kwargs: dict[str, Any]


class _Reached(Exception):
    """Ends a forward at its first layer."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class _StandIn(nn.Module):
    """In the place of a decoder layer."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.index = index
        self.on_call: Callable[[int, LayerCall], Any] = _unused
        # What forwards ask of their layers, such as attention_type.
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)}
        self.__dict__.update({name: value for name, value in plain.items() if name not in self.__dict__})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args:
            args = (kwargs.pop("hidden_states"),)
        return self.on_call(self.index, LayerCall(args[0], args[1:], kwargs))


def _unused(index: int, call: LayerCall) -> Any:
    raise AssertionError("a stand-in was called outside of a shell's run")


class _LeftOut(nn.Module):
    """In the place of a module whose result does not matter: hidden states pass, all else becomes a zero."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.dim() >= 3:
                return tensor
        return torch.zeros((), device=tensors[0].device if tensors else None)


class Anatomy:
    """Which modules of a model are before its layers, which are its layers, and which come after them.

    Raises:
        ConfigError: The model is none that can be split; says why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = type(model).__name__
        self.model = model
        self.layers_path = self._find_layers()
        self.layers: list[nn.Module] = list(model.get_submodule(self.layers_path).children())
        self.returns_tuple = False
        self.front: list[str] = []  # paths of modules
        self.tail: list[str] = []
        self._survey()
        self._check_parameters()

    def refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"from_transformers: {self.name} cannot be split into stages: {why}.\nIt takes decoder-only language "
            "models (GPT-2, Llama, Qwen, OPT, ...); others become a PipelineModule by hand, as a list of layers."
        )

    def shell(self, tensors: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
        """A copy of the model with stand-ins, which shares the tensors, or has `tensors(tensor)` for each."""
        memo: dict[int, Any] = {id(self.model.config): self.model.config}
        for index, layer in enumerate(self.layers):
            memo[id(layer)] = _StandIn(layer, index)
        for tensor in self._own_tensors():
            memo[id(tensor)] = tensor if tensors is None else tensors(tensor)
        return copy.deepcopy(self.model, memo)

    def weightless(self) -> Anatomy:
        """Of a copy of the model that takes no memory: its layers are stand-ins."""
        other = copy.copy(self)
        other.model = self.shell(_weightless).eval()
        other.layers = list(other.model.get_submodule(self.layers_path).children())
        return other

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()

    def _find_layers(self) -> str:
        config = self.model.config
        if getattr(config, "is_encoder_decoder", False):
            raise self.refused("it has an encoder beside its decoder")
        if getattr(config, "output_router_logits", False):
            raise self.refused("output_router_logits adds a loss of its routers; set it to false")
        if getattr(config, "layerdrop", 0):
            raise self.refused("layerdrop leaves out layers, which every stage would have to know; set it to 0")
        if self.model.base_model is self.model or self.model.get_output_embeddings() is None:
            raise self.refused("it has no head over a base model (expected a ...ForCausalLM)")
        count = getattr(config.get_text_config(), "num_hidden_layers", None)
        found = [
            path
            for path, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        shallow = [path for path in found if path.count(".") == min(one.count(".") for one in found)]
        if len(shallow) != 1:
            raise self.refused(f"expected one list of {count} layers (num_hidden_layers), found {shallow}")
        return str(shallow[0])

    # ---------------------------------------------------------------- which modules are called when
    def _survey(self) -> None:
        """Run the base model on few tokens, with weights that take no memory, and look which modules it calls."""
        shell = self.shell(_weightless).eval()
        for is_tuple in (False, True):
            self.returns_tuple = is_tuple
            try:
                order, calls, output = self._watch(shell, 1)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                continue
            if output is not None and output.shape[:2] == (2, 3):
                break
            why = "what its base model returns is no hidden states"
        else:
            raise self.refused(f"its layers do not take and return hidden states ({why})")
        marks = [place for place, path in enumerate(order) if path == self.layers_path]
        if len(marks) != len(self.layers):
            raise self.refused(f"its forward calls {len(marks)} of its {len(self.layers)} layers, or some twice")
        if marks[-1] - marks[0] != len(marks) - 1:
            between = [path for path in order[marks[0] : marks[-1]] if path != self.layers_path]
            raise self.refused(f"{between[0]} is called between its layers")
        self._check_calls(calls, self._watch(shell, 2)[1])
        self.front = _topmost(order[: marks[0]])
        outside = [path for path, child in self.model.named_children() if not self._holds_layers(path) and _has(child)]
        self.tail = _topmost([*order[marks[-1] + 1 :], *outside])

    def _watch(self, shell: Any, first_token: int) -> tuple[list[str], list[LayerCall], Any]:
        order: list[str] = []
        hooks = []
        for path, module in shell.named_modules():
            if not self._holds_layers(path) and not isinstance(module, _StandIn):
                hooks.append(module.register_forward_pre_hook(lambda *_, path=path: order.append(path)))
        calls: list[LayerCall] = []

        def on_call(index: int, call: LayerCall) -> Any:
            order.append(self.layers_path)
            calls.append(call)
            return (call.hidden,) if self.returns_tuple else call.hidden

        vocabulary = self.model.get_input_embeddings().num_embeddings
        ids = (torch.arange(6).view(2, 3) + first_token) % vocabulary
        try:
            output = run_shell(shell.base_model, on_call, input_ids=ids)
        finally:
            for hook in hooks:
                hook.remove()
        return order, calls, getattr(output, "last_hidden_state", None)

    def _check_calls(self, calls: Sequence[LayerCall], others: Sequence[LayerCall]) -> None:
        """Raise if layers take anything that depends on the tokens: it would have to go from stage to stage."""
        for call, other in zip(calls, others, strict=True):
            given = pytree.tree_leaves((call.args, call.kwargs))
            given_other = pytree.tree_leaves((other.args, other.kwargs))
            for one, another in zip(given, given_other, strict=True):
                if isinstance(one, torch.Tensor) and (one.requires_grad or not torch.equal(one, another)):
                    raise self.refused("its layers take more of the tokens than the hidden states")

    def _check_parameters(self) -> None:
        places = (*self.front, *self.tail, self.layers_path)
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            if not any(name.startswith(f"{place}.") for place in places):
                raise self.refused(f"the parameter {name} belongs to none of the modules around its layers")

    def _holds_layers(self, path: str) -> bool:
        return not path or self.layers_path == path or self.layers_path.startswith(f"{path}.")


def run_shell(shell: Any, on_call: Callable[[int, LayerCall], Any], **inputs: Any) -> Any:
    """A forward of a shell, or of its base model, without a cache."""
    for module in shell.modules():
        if isinstance(module, _StandIn):
            module.on_call = on_call
    given = {name: value for name, value in inputs.items() if value is not None}
    return shell(**given, use_cache=False)


def _weightless(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape that takes next to no memory, on the CPU; a buffer that has values keeps them."""
    if not isinstance(tensor, nn.Parameter):
        return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu()
    row = torch.linspace(0.5, 1.5, tensor.shape[-1] if tensor.dim() else 1, device="cpu")
    return nn.Parameter((row if tensor.dim() else row[0]).expand(tensor.shape))


def _topmost(paths: Sequence[str]) -> list[str]:
    """Without repetitions and without what is inside of another one."""
    unique = list(dict.fromkeys(paths))
    return [path for path in unique if not any(path.startswith(f"{other}.") for other in unique)]


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
    """From token ids to the hidden states of the first layer."""

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


class Calls:
    """How a model calls its layers, for the mask and positions of a batch.

    The last answer is kept, as layers run in a row. One for all layers of a model on a rank; it has no weights.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self._shell = anatomy.shell(lambda tensor: tensor.detach().to("meta") if _is_param(tensor) else tensor)
        self._num_layers = len(anatomy.layers)
        self._returns_tuple = anatomy.returns_tuple
        leave_out(self._shell, [*anatomy.front, *anatomy.tail])
        self._key: tuple[Any, ...] = ()
        self._batch: tuple[Any, Any] = (None, None)
        self._calls: list[LayerCall] = []

    def of(self, index: int, flow: Flow, *, training: bool) -> LayerCall:
        """The call of a layer; its hidden states are none."""
        hidden, mask, positions = flow
        key = (hidden.shape, hidden.dtype, hidden.device, training)
        if key != self._key or mask is not self._batch[0] or positions is not self._batch[1]:
            self._calls = self._run(hidden, mask, positions, training)
            self._key, self._batch = key, (mask, positions)
        return self._calls[index]

    @torch.no_grad()
    def _run(self, hidden: torch.Tensor, mask: Any, positions: Any, training: bool) -> list[LayerCall]:
        calls: list[LayerCall] = []

        def on_call(index: int, call: LayerCall) -> Any:
            calls.append(LayerCall(torch.empty(0), call.args, call.kwargs))
            return (call.hidden,) if self._returns_tuple else call.hidden

        self._shell.train(training)
        _move_buffers(self._shell, hidden.device)
        base, embeds = self._shell.base_model, torch.zeros_like(hidden)  # some forwards change them in place
        run_shell(base, on_call, inputs_embeds=embeds, attention_mask=mask, position_ids=positions)
        if len(calls) != self._num_layers:
            raise AssertionError(f"the model called {len(calls)} of its {self._num_layers} layers")
        return calls


class DecoderLayer(nn.Module):
    """A decoder layer of the model, called as the model calls it."""

    def __init__(self, anatomy: Anatomy, index: int, calls: Calls) -> None:
        super().__init__()
        self.layer = anatomy.layers[index]
        self.layer_class = type(self.layer).__name__
        self._index = index
        self._calls = calls

    def forward(self, flow: Flow) -> Flow:
        hidden, mask, positions = flow
        call = self._calls.of(self._index, flow, training=self.training)
        result = self.layer(hidden, *call.args, **call.kwargs)
        return (result[0] if isinstance(result, tuple) else result), mask, positions


class Head(_Part):
    """From the hidden states of the last layer to the logits."""

    def __init__(self, anatomy: Anatomy) -> None:
        shell = anatomy.shell()
        leave_out(shell, [path for path in anatomy.front if path not in anatomy.tail])
        super().__init__(shell, anatomy.tail)
        self._returns_tuple = anatomy.returns_tuple

    def forward(self, flow: Flow) -> torch.Tensor:
        """Logits (batch, tokens, vocabulary)."""
        hidden, mask, positions = flow

        def on_call(index: int, call: LayerCall) -> Any:
            return (hidden,) if self._returns_tuple else hidden

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


def _is_param(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


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
