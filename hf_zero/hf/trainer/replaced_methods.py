"""The methods of transformers.Trainer that ours take the place of, by name.

Each function that is `in_place_of` a method gets that method, bound, as `orig`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.hf.accelerator.plugin import ZeroAcceleratorMixin, ZeroPlugin

Original = Callable[..., Any]
# Method of transformers.Trainer -> what takes its place, and the leading parameters that it must have.
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}


def plugin_of(trainer: Any) -> ZeroPlugin | None:
    """The plugin of a Trainer that ZeRO is in force for."""
    accelerator = getattr(trainer, "accelerator", None)
    return accelerator.zero_plugin if isinstance(accelerator, ZeroAcceleratorMixin) else None


def engine_of_trainer(trainer: Any) -> ZeroEngine | None:
    """The engine of a Trainer's model, once it has one."""
    return engine_of(trainer.model) if plugin_of(trainer) is not None else None


def in_place_of(name: str, *parameters: str, needs: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """Replace `Trainer.name`, which takes `parameters` first, by the decorated function.

    Args:
        needs: `plugin_of` or `engine_of_trainer`, which the function gets after `orig`; where there is none, `orig`
            runs alone.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def act(self: Any, orig: Original, *args: Any, **kwargs: Any) -> Any:
            if needs is None:
                return function(self, orig, *args, **kwargs)
            found = needs(self)
            return orig(*args, **kwargs) if found is None else function(self, orig, found, *args, **kwargs)

        FUNCTIONS[name] = act, parameters
        return function

    return register
