"""An nn.Module that stands for another one, as the engines and wrappers of other libraries do."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

_WrapperT = TypeVar("_WrapperT", bound="ModuleWrapper")


class ModuleWrapper(nn.Module):
    """Behaves as its one child, `module`, does: the same call, mode, compilation, and attributes.

    As with any wrapper the names of parameters and of `state_dict()` begin with "module."; those of the model itself
    are `module`'s. Attributes that are not the wrapper's are the model's.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Python comes here for what neither the object nor its class has.
        model = self.__dict__.get("_modules", {}).get("module")
        if name == "module" and model is not None:
            return model
        if model is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(model, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its model, a {type(model).__name__}, has an attribute {name!r}"
            ) from None

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    @property
    def training(self) -> bool:
        """The model's: there is no mode of the wrapper's own."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        model = self.__dict__.get("_modules", {}).get("module")
        if model is not None:  # nn.Module's constructor sets it before there is a model
            model.training = mode

    def train(self: _WrapperT, mode: bool = True) -> _WrapperT:
        self.module.train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model's forward in place, as `model.compile` does."""
        self.module.compile(*args, **kwargs)
