"""`hf_zero.comm`, `hf_zero.ops.adam`, `hf_zero.zero`, ...: DeepSpeed's import paths, with the first name changed.

Their modules lie in this folder, under the same paths. A name is looked up here where hf_zero itself has none.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent
_PACKAGE = "hf_zero"


def install() -> None:
    """Make them importable. Before the others: Python's own would load a second copy of what is below an alias."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or _has(_HERE.parents[1], name) or not _has(_HERE, name):
            return None
        return ModuleSpec(fullname, _Alias(f"{__package__}.{name}"))


class _Alias(Loader):
    """Gives a module that has a name of its own already."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has put the alias's there


def _has(folder: Path, name: str) -> bool:
    place = folder.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()
