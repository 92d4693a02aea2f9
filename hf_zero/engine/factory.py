"""The class of every engine that hf_zero makes: ZeroEngine, or a subclass of it that a room above this one names.

hf_zero/__init__.py names the one that has DeepSpeed's names, so that all engines answer to them, whichever way they
were made, and neither `engine/` nor `hf/` knows these names. No torch here before an engine is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_zero.engine.engine import ZeroEngine

_load: Callable[[], type[ZeroEngine]]


def use_engine_class(load: Callable[[], type[ZeroEngine]]) -> None:
    """Make engines of the class that `load()` returns."""
    global _load
    _load = load


def engine_class() -> type[ZeroEngine]:
    """What to construct an engine with; the arguments are ZeroEngine's."""
    return _load()
