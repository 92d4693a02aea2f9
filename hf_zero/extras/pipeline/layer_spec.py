"""Layers that are described first and built later, by the ranks that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError


class LayerSpec:
    """A layer to be built where it runs: its class and the arguments of its constructor.

    Raises:
        ConfigError: `typename` is no class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(
                f"{type(self).__name__}: {typename!r} is no class of torch.nn.Module. Expected the class and the "
                "arguments of its constructor, as in LayerSpec(nn.Linear, 8, 8); functions are layers as they are."
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        given = [repr(value) for value in self.module_args]
        given += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{type(self).__name__}({', '.join([self.typename.__name__, *given])})"

    def build(self) -> nn.Module:
        """A new module."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer whose module is that of all specs with its key: one module on a stage, equal copies on several.

    Args:
        key: Specs with one key are one module. The first of them in the order of layers says how it is built.
        forward_fn: Called as `forward_fn(module, inputs)` where this layer runs; None: the module itself.
        tied_weight_attr: Taken for DeepSpeed's sake: all parameters of the module are tied, as in one process.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
