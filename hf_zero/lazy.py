"""Names that a module gives without loading what they stand for before their first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(module: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `module`, whose names are in the modules that `exports` gives for them."""

    def get(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(exports[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return get
