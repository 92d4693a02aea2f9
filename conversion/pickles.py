"""Reads what torch.save wrote elsewhere, without running anything of it.

torch's weights-only unpickler builds tensors, containers and a closed list of types. Each of the list stands for a
class by its name: the class itself need not be installed, and no code of it runs.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hf_zero.errors import CheckpointError


class StandIn:
    """Stands for an object of another package, whose attributes are in `vars()`."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def save_anything(value: Any, path: Path, classes: Mapping[type, str] | None = None) -> None:
    """Write a file of torch.save.

    Args:
        classes: Class of a stand-in -> full name of the class that it is written as.
    Raises:
        CheckpointError: The operating system refused, in the middle of a file too.
    """
    names = classes or {}

    base: Any = vars(pickle)["_Pickler"]  # the one in C looks for the class of that name

    class Pickler(base):  # type: ignore[misc]
        def save_global(self, obj: Any, name: str | None = None) -> None:
            if not isinstance(obj, type) or obj not in names:
                super().save_global(obj, name)
                return
            module, _, own = names[obj].rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())
            self.memoize(obj)

    try:
        torch.save(value, path, pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))
    except RuntimeError as error:  # torch's own, where the system refused
        raise CheckpointError(f"cannot write {path}: is the disk full? torch says: {_first_line(error)}") from error


def load_pickle(path: Path, stand_ins: Mapping[str, type] | None = None) -> dict[str, Any]:
    """The dictionary in a file of torch.save; see `load_anything`."""
    found = load_anything(path, stand_ins)
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}: expected a dictionary. It is another tool's file."
        )
    return found


def load_anything(path: Path, stand_ins: Mapping[str, type] | None = None) -> Any:
    """Read a file of torch.save; its tensors are mapped, so that only what is used of them is read.

    Args:
        stand_ins: Full name of a class -> what is built in its place.
    Raises:
        CheckpointError: The file is missing, damaged, or holds objects of other types, which were not built.
    """
    _check_archive(path)
    allowed: list[Any] = [(kind, name) for name, kind in (stand_ins or {}).items()]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), "it is damaged")
        raise CheckpointError(
            f"{path} holds more than tensors, numbers and containers, and nothing of it was executed: {reason}\n"
            "Save the checkpoint again without that object (client_state, schedulers and optimizers may hold one)."
        ) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"cannot read {path}: {_first_line(error)}. Copy the file again.") from error


def _check_archive(path: Path) -> None:
    """Compare the checksums in the file: mapped tensors are read without that."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        raise CheckpointError(
            f"cannot read {path}: {_first_line(error)}. Copy the file again; a file of torch before 1.6 must be saved "
            "again by a newer one."
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} in it does not fit. Copy the file again.")


def _first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].rstrip(".")
