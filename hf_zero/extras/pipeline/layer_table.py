"""The classes and parameters of a pipeline's layers, and which of them are the same. Equal on all ranks.

Specs are built on the meta device for it, one after another, so that no rank holds the parameters of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.extras.pipeline.layer_spec import LayerSpec, TiedLayerSpec
from hf_zero.extras.pipeline.random_states import random_states_kept

Layer = nn.Module | LayerSpec | Callable[[Any], Any]


@dataclass(frozen=True)
class ParamRow:
    """A parameter of a layer. Where several layers share it, `canonical` is its name in the first one."""

    name: str  # in the state dict of the whole sequence: "13.weight"
    canonical: str
    numel: int
    requires_grad: bool


@dataclass(frozen=True)
class LayerRow:
    """A layer. `first` is the first layer that has the same module: a tied spec's, or one that is given twice."""

    index: int
    class_name: str
    first: int
    params: tuple[ParamRow, ...]

    @property
    def num_trainable(self) -> int:
        """The number of elements of its trainable parameters."""
        return sum({row.canonical: row.numel for row in self.params if row.requires_grad}.values())


def describe_layers(layers: Sequence[Layer]) -> list[LayerRow]:
    """A row for each layer.

    Raises:
        ConfigError: A layer is none, cannot be built, or is tied to one of another class or other shapes.
    """
    rows: list[LayerRow] = []
    modules: dict[int, int] = {}  # id of a module -> the first layer that has it
    names: dict[int, str] = {}  # id of a parameter -> its name in the first layer that has it
    alive = _modules_of(layers)  # until the end: the ids are theirs
    for index, (layer, module) in enumerate(zip(layers, alive, strict=True)):
        params = []
        for name, param in module.named_parameters(remove_duplicate=False) if module is not None else ():
            full = f"{index}.{name}"
            canonical = names.setdefault(id(param), full)
            params.append(ParamRow(full, canonical, param.numel(), param.requires_grad))
        first = index if module is None else modules.setdefault(id(module), index)
        rows.append(LayerRow(index, class_name(layer), first, tuple(params)))
    return rows


def class_name(layer: Layer) -> str:
    """The class name of a layer's module, or the name of a function. A module may give another as `layer_class`."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return str(getattr(layer, "layer_class", type(layer).__name__))
    return getattr(layer, "__name__", type(layer).__name__)


def _modules_of(layers: Sequence[Layer]) -> list[nn.Module | None]:
    """The module of each layer, on the meta device where it is yet to be built; None for a function."""
    found: list[nn.Module | None] = []
    tied: dict[str, int] = {}  # key -> the first layer that has it
    for index, layer in enumerate(layers):
        _check(layer, index)
        module = layer if isinstance(layer, nn.Module) else None
        if isinstance(layer, LayerSpec):
            module = _on_meta(layer, index)
        if isinstance(layer, TiedLayerSpec):
            first = tied.setdefault(layer.key, index)
            if first != index:
                known = found[first]
                assert known is not None and module is not None
                _check_tied(layer.key, (first, known), (index, module))
                module = known
        found.append(module)
    return found


def _check(layer: Any, index: int) -> None:
    if isinstance(layer, nn.Module | LayerSpec):
        return
    remedy = "expected a module, a function of one argument, a LayerSpec or a TiedLayerSpec"
    if isinstance(layer, type):
        raise ConfigError(
            f"PipelineModule: layer {index} is the class {layer.__name__}: {remedy}. Write {layer.__name__}(...) or "
            f"LayerSpec({layer.__name__}, ...)."
        )
    if not callable(layer):
        raise ConfigError(f"PipelineModule: layer {index} is {layer!r} ({type(layer).__name__}): {remedy}.")


def _on_meta(spec: LayerSpec, index: int) -> nn.Module:
    try:
        with random_states_kept():
            try:
                with torch.device("meta"):
                    return spec.build()
            except (NotImplementedError, RuntimeError):  # its constructor reads values, which meta tensors have not
                return spec.build().to("meta")
    except Exception as error:
        raise ConfigError(
            f"PipelineModule: layer {index}, {spec!r}, cannot be built: {type(error).__name__}: {error}"
        ) from error


def _check_tied(key: str, one: tuple[int, nn.Module], other: tuple[int, nn.Module]) -> None:
    """Raise unless both modules have one class and parameters of the same names and shapes."""
    said = []
    for _, module in (one, other):
        shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
        said.append((type(module), shapes))
    if said[0] != said[1]:
        (first, second) = (f"{kind.__name__} with {shapes}" for kind, shapes in said)
        raise ConfigError(
            f"PipelineModule: TiedLayerSpec({key!r}) is {first} at layer {one[0]}, and {second} at layer {other[0]}: "
            "specs with one key are one module. Give them one class and one size (forward_fn says how a layer uses "
            "the module), or different keys."
        )
