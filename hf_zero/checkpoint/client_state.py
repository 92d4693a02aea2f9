"""Keeps `client_state`, the values that a program saves beside the model, in the manifest, which is JSON.

What JSON gives back unchanged stands there as it is. Everything else, such as tensors, tuples, and keys that are
numbers, is the text of a file of torch.save, which torch reads without running code of it (weights_only).
"""

from __future__ import annotations

import base64
import io
import pickle
import re
from argparse import Namespace
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch

from hf_zero.errors import CheckpointError

_SAVED = "torch.save"  # the only key of a dictionary whose value is the file as text
_UNKNOWN = re.compile(r"GLOBAL (\S+)")

# The classes that are read beside torch's own: the values of command lines, and of numpy's random states.
_KNOWN: list[Any] = [
    Namespace,
    PosixPath,
    bytes,
    np.ndarray,
    np.dtype,
    np.empty(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
]


def encode_client_state(value: Any) -> Any:
    """Return `value` as the JSON that the manifest holds. No communication.

    Raises:
        CheckpointError: It holds an object that torch would not read again.
    """
    if _is_kept_by_json(value) and not _is_encoded(value):
        return value
    file = io.BytesIO()
    try:
        torch.save(_plain(value), file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # such as a lock, or a lambda
        raise CheckpointError(f"client_state holds an object that cannot be saved: {error}") from error
    encoded = {_SAVED: base64.b64encode(file.getbuffer()).decode()}
    decode_client_state(encoded)
    return encoded


def decode_client_state(value: Any) -> Any:
    """Return what `encode_client_state` was given; tensors are on the CPU.

    Raises:
        CheckpointError: The text is damaged, or holds objects of classes that are not known; none of them was built.
    """
    if not _is_encoded(value):
        return value
    try:
        file = io.BytesIO(base64.b64decode(value[_SAVED], validate=True))
        with torch.serialization.safe_globals(_KNOWN):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        unknown = _UNKNOWN.search(str(error))
        reason = f"an object of the class {unknown[1]}" if unknown else "an object that torch does not read"
        raise CheckpointError(
            f"client_state holds {reason}. Save its values: tensors, arrays, numbers, texts and containers. "
            "Classes that are given to torch.serialization.add_safe_globals before saves and loads may stay."
        ) from error
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(f"the client_state in the manifest is damaged: {error}. Copy the file again.") from error


def _is_encoded(value: Any) -> bool:
    return isinstance(value, dict) and [*value] == [_SAVED]


def _is_kept_by_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_kept_by_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_kept_by_json(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    """Return it with plain dictionaries and lists, as JSON would: torch reads few classes that extend them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return tuple(map(_plain, value)) if type(value) is tuple else value
