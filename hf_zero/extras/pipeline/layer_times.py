"""Seconds that each layer takes for a forward and its backward: the weights of partition_method="profile".

The idea is PipeDream's (arXiv:1806.03377, section 3.1): measure once, then balance the stages.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_zero.distributed.processes import default_device
from hf_zero.errors import ConfigError
from hf_zero.extras.pipeline.layer_spec import LayerSpec, TiedLayerSpec
from hf_zero.extras.pipeline.layer_table import Layer
from hf_zero.extras.pipeline.random_states import random_states_kept

_BATCH, _TOKENS = 2, 64  # of a sample that is made here
_TIMED = 3  # The fastest of these runs counts, since other work on the host can only make a run slower.
_REMEDY = "Give profile_inputs=, an input of the first layer such as a micro-batch."


def measure_layers(layers: Sequence[Layer], inputs: Any = None) -> list[float]:
    """Measure the seconds that each layer takes on this process's device: the fastest of three runs after a first one.

    Specs are built one at a time and dropped again, except tied ones.

    Args:
        inputs: What the first layer takes; None: made up from its first module with a known input.
    Raises:
        ConfigError: No input is known, or a layer raised.
    """
    device = default_device()
    built: dict[str, nn.Module] = {}
    seconds = []
    with random_states_kept():
        for index, layer in enumerate(layers):
            function = _function_of(layer, built, device)
            if index == 0:
                inputs = _to(_sample(function) if inputs is None else inputs, device)
            try:
                outputs = _run(function, inputs)
                seconds.append(min(_seconds(function, inputs, device) for _ in range(_TIMED)))
            except Exception as error:
                raise ConfigError(
                    f'partition_method="profile": layer {index} raised {type(error).__name__}: {error}. '
                    f"{_REMEDY if index == 0 else 'It was given what layer ' + str(index - 1) + ' returns.'}"
                ) from error
            inputs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
    return seconds


def _function_of(layer: Layer, built: dict[str, nn.Module], device: torch.device) -> Callable[[Any], Any]:
    """The layer as it runs, on the device. A module that was given is copied there if it lies elsewhere."""
    if isinstance(layer, TiedLayerSpec):
        if layer.key not in built:
            built[layer.key] = layer.build().to(device)
        module = built[layer.key]
        forward_fn = layer.forward_fn
        return module if forward_fn is None else lambda inputs: forward_fn(module, inputs)
    if isinstance(layer, LayerSpec):
        return layer.build().to(device)
    if isinstance(layer, nn.Module) and any(param.device != device for param in layer.parameters()):
        return _copy(layer, device)
    return layer


def _copy(layer: nn.Module, device: torch.device) -> nn.Module:
    """Copy a layer to the device, with zeros for parameters that have no values yet."""
    copied = copy.deepcopy(layer)
    for module in copied.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                module._parameters[name] = nn.Parameter(torch.zeros_like(param, device=device))
    return copied.to(device)


def _run(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Forward and backward, without touching the gradients of parameters."""
    leaves = pytree.tree_map_only(torch.Tensor, _leaf, inputs)
    outputs = function(leaves)
    wanted = [one for one in pytree.tree_leaves(leaves) if isinstance(one, torch.Tensor) and one.requires_grad]
    if isinstance(function, nn.Module):
        wanted += [param for param in function.parameters() if param.requires_grad]
    ends = [one for one in pytree.tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
    if ends and wanted:
        torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
    return outputs


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _to(inputs: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)


def _sample(function: Callable[[Any], Any]) -> torch.Tensor:
    """Token ids for a layer whose first module of the two kinds is an embedding, vectors for a linear one."""
    modules = list(function.modules()) if isinstance(function, nn.Module) else []
    embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
    for module in modules:
        if isinstance(module, nn.Embedding):
            tokens = min(_TOKENS, *(one.num_embeddings for one in embeddings), module.num_embeddings)
            return torch.randint(module.num_embeddings, (_BATCH, tokens))
        if isinstance(module, nn.Linear):
            return torch.randn(_BATCH, module.in_features, dtype=module.weight.dtype)
    raise ConfigError(f'partition_method="profile": it is not known what the first layer takes. {_REMEDY}')


def _seconds(function: Callable[[Any], Any], inputs: Any, device: torch.device) -> float:
    began = _now(device)
    _run(function, inputs)
    return _now(device) - began


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
