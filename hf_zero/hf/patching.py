"""Keeps what is in force in this process: a configuration, and our functions in transformers and accelerate.

Methods of classes are replaced while a configuration is in force, methods of one model while it has an engine. A patch
point is a method of a class that acts through one of our functions. It is checked by name and signature first, and so
is what else of transformers ours call: an upgrade that renamed one is an error that says so, never a run without ZeRO.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError
from hf_zero.hf.versions import found, remedy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Foreign:
    """A function of a foreign class or module that ours call or replace."""

    owner: Any
    name: str
    parameters: tuple[str, ...]  # leading ones after the first

    def problem(self) -> str | None:
        """Return why the function is not the one that ours were written for, or None."""
        where = f"{self.owner.__name__}.{self.name}"
        method = self.owner.__dict__.get(self.name)
        if method is None:
            return f"{where} is missing"
        found = tuple(inspect.signature(_plain(method)).parameters)[1:]
        if found[: len(self.parameters)] != self.parameters:
            return f"{where} takes ({', '.join(found)}), expected ({', '.join(self.parameters)}, ...)"
        return None


@dataclass(frozen=True)
class PatchPoint(Foreign):
    """A method of a foreign class: a call of it becomes `function(original, *args, **kwargs)`.

    `original` is the plain function, of static and class methods too.
    """

    function: Callable[..., Any]


def _patch(point: PatchPoint) -> tuple[PatchPoint, Any, Any]:
    """Put the function of `point` into its class; returns what was there, and what is there now."""
    original = point.owner.__dict__[point.name]
    plain = _plain(original)

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        return point.function(plain, *args, **kwargs)

    ours: Any = type(original)(function) if isinstance(original, staticmethod | classmethod) else function
    setattr(point.owner, point.name, ours)
    return point, original, ours


def _plain(method: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(method, "__func__", method)
    return function


class Patches:
    """Patch points that are open: their functions are in their classes."""

    def __init__(self) -> None:
        self._patches: list[tuple[PatchPoint, Any, Any]] = []  # with the original and ours

    def open(self, functions: Sequence[Foreign]) -> None:
        """Check `functions`, and put ours into the patch points among them, if that is not done yet.

        Raises:
            ConfigError: One of them is not there or takes other arguments.
        """
        if not self._patches:
            check_functions(functions)
            self._patches = [_patch(one) for one in functions if isinstance(one, PatchPoint)]

    def close(self) -> None:
        """Put every original back."""
        for point, original, ours in reversed(self._patches):
            if point.owner.__dict__.get(point.name) is ours:
                setattr(point.owner, point.name, original)
            else:
                # Somebody wrapped our wrapper. It passes through while nothing is active, so it may stay.
                logger.warning("%s.%s was patched again by other code and stays so", point.owner.__name__, point.name)
        self._patches.clear()


class Activation:
    """Holds at most one configuration, strongly, and the patch points that were opened for it."""

    def __init__(self) -> None:
        self.config: ZeroConfig | None = None
        # Given to `enable`: serves arguments without `zero`, and Accelerators that user code makes.
        self.enabled: ZeroConfig | None = None
        self._patches = Patches()
        self._held_back = 0

    def activate(self, config: ZeroConfig, functions: Sequence[Foreign], *, for_everyone: bool) -> None:
        """Make `config` the active one, and open the patch points among `functions` if that is not done yet.

        Raises:
            ConfigError: One of `functions` is not there or takes other arguments.
        """
        self._patches.open(functions)
        self.config = config
        if for_everyone:
            self.enabled = config

    def deactivate(self) -> None:
        """Forget the configuration and put every original back."""
        self._patches.close()
        self.config = None
        self.enabled = None

    @property
    def accelerator_config(self) -> ZeroConfig | None:
        """The configuration that an Accelerator made by user code right now has to take."""
        return None if self._held_back else self.enabled

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Accelerators made inside are left alone: a Trainer attaches its own, with its arguments."""
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `owner.name` is `value`."""
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def instead(target: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, `target.name(...)` calls `function`, on this one object."""
    target.__dict__[name] = function
    try:
        yield
    finally:
        del target.__dict__[name]


def replace_method(module: nn.Module, name: str, engine: ZeroEngine, method: Callable[..., Any]) -> None:
    """Let `module.name(...)` call `method(original, ...)`, until the engine leaves the model.

    A bound method is still one: programs look at its `__func__`, for where it comes from.
    """
    own = module.__dict__.get(name)
    original = getattr(module, name)
    if not inspect.ismethod(original):
        module.__dict__[name] = functools.wraps(original)(functools.partial(method, original))
    else:
        module.__dict__[name] = types.MethodType(_around(original.__func__, method), original.__self__)

    def undo() -> None:
        module.__dict__.pop(name, None)
        if own is not None:
            module.__dict__[name] = own

    engine.on_uninstall(undo)


def _around(function: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def stand_in(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return method(types.MethodType(function, self), *args, **kwargs)

    return stand_in


def by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """All arguments of a call by name, with those in **kwargs."""
    given = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given


def check_functions(functions: Sequence[Foreign]) -> None:
    """Raise if one of `functions` is not there or takes other arguments.

    Raises:
        ConfigError: Names all of them and the installed versions.
    """
    problems = [problem for one in functions if (problem := one.problem()) is not None]
    if problems:
        owners = {getattr(one.owner, "__module__", one.owner.__name__).partition(".")[0] for one in functions}
        packages = sorted({"accelerate", "transformers"} | owners)
        listed = "\n".join(f"{number}. {problem}" for number, problem in enumerate(problems, start=1))
        raise ConfigError(
            f"hf_zero does not fit the installed {found(packages)}:\n{listed}\n"
            f"Install versions that hf_zero was run with: {remedy(packages)}."
        )


# One per process, because what it patches is one per process.
ACTIVATION = Activation()
