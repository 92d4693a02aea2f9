"""The parts of an engine that annexes and the rooms above it bring: activation checkpointing, monitors, saving.

The engine calls them through `EnginePart` alone, so it imports none of them. hf_zero/__init__.py registers the parts
of the package by name: importing hf_zero loads none of them, and making the first engine loads them all.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_zero.engine.reports import Watcher


class EnginePart:
    """One annex's part of one engine, on every rank. A method that a subclass leaves out does nothing.

    The constructor runs before the model is sharded: check there what the configuration asks for, and raise
    ConfigError on every rank alike. `engine` has `module`, `config`, `comm`, `run_comm` and `trains` by then.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def start(self) -> Sequence[Watcher]:
        """Start work once the engine has its units and its schedule; return what is told of micro-batches and steps.

        Watchers are for engines that train (`engine.trains`). Without any the engine hooks nothing on for reports.
        """
        return ()

    def attach(self) -> None:
        """Put on the model what belongs there, each time the engine comes to it; undo it by `engine.on_uninstall`."""

    def memory(self) -> dict[str, int]:
        """Return entries of `engine.memory_report()`, in bytes."""
        return {}

    def summarize(self) -> None:
        """Log what the run came to: Trainer calls this after training, and `teardown` when it begins."""

    def close(self) -> None:
        """End what `start` began: the engine leaves its model for good."""


_makers: list[tuple[str | Callable[[Any], EnginePart], str]] = []


def register(make: str | Callable[[Any], EnginePart], *, needs: str = "sys") -> Callable[[], None]:
    """Give every engine that is made from now on the part `make(engine)`; a string "module:name" is loaded then.

    Args:
        needs: The part is left out while this package is not imported.
    Returns:
        A function that ends it for engines to come.
    """
    entry = (make, needs)
    _makers.append(entry)
    return lambda: _makers.remove(entry)


def parts_of(engine: Any) -> list[EnginePart]:
    """Make all registered parts for `engine`, in the order of registration. All ranks must call."""
    wanted = [make for make, needs in _makers if needs in sys.modules]
    return [(pkgutil.resolve_name(make) if isinstance(make, str) else make)(engine) for make in wanted]
