"""`client_state` comes back as it was given, and is read without running code of it."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import threading
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_zero.checkpoint.client_state import decode_client_state, encode_client_state
from hf_zero.errors import CheckpointError


class Own:
    """A class of the user's program."""


def through_json(value: Any) -> Any:
    return decode_client_state(json.loads(json.dumps(encode_client_state(value))))


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        {"epoch": 3, "losses": [1.5, float("inf")], "note": None},
        (1, [2, (3,)]),
        {1: "a", (2, 3): {"b": b"c"}},
        {"args": Namespace(lr=1e-3, shape=(2, 3), folder=Path("out")), "seen": {4, 5}},
        {"torch.save": "a key of the user's"},
    ],
    ids=str,
)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = through_json(value)
    assert found == value and type(found) is type(value)


def test_json_stays_readable() -> None:
    """Other programs read the manifest; a value that JSON keeps is not hidden in a file of torch."""
    value = {"epoch": 3, "losses": [1.5], "order": OrderedDict(a=1)}
    assert json.loads(json.dumps(encode_client_state(value))) == value


def test_states_of_random_generators_go_on() -> None:
    generator = np.random.default_rng(0)
    given = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": generator.bit_generator.state,
        "torch": torch.get_rng_state(),
    }

    def draw() -> list[Any]:
        return [random.random(), np.random.rand(), generator.random(), torch.rand(()).item()]

    first = draw()
    assert draw() != first
    found = through_json(given)
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    generator.bit_generator.state = found["generator"]
    torch.set_rng_state(found["torch"])
    assert draw() == first


def test_tensors_and_arrays_keep_their_types() -> None:
    tensors = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in ("bfloat16", "int64", "bool")}
    arrays: list[Any] = [np.array(["a", "bc"]), np.float32([1.5]), np.zeros((2, 0)), np.array([True])]
    found = through_json({"tensors": tensors, "arrays": arrays, "one": np.float64(2.5)})
    assert found["one"] == 2.5
    for name, tensor in tensors.items():
        assert found["tensors"][name].dtype == tensor.dtype and torch.equal(found["tensors"][name], tensor)
    for array, again in zip(arrays, found["arrays"], strict=True):
        assert again.dtype == array.dtype and again.shape == array.shape and (again == array).all()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [Own()]}, f"an object of the class {__name__}.Own"),
        ((range(3),), "an object of the class range"),
        ({"lock": threading.Lock()}, "cannot be saved: cannot pickle '_thread.lock' object"),
        ({"call": lambda: None}, "cannot be saved"),
    ],
)
def test_other_objects_are_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match="client_state holds") as caught:
        encode_client_state(value)
    assert named in str(caught.value)


def test_classes_that_the_user_allows_are_kept() -> None:
    own = Own()
    own.value = 3  # type: ignore[attr-defined]
    with torch.serialization.safe_globals([Own]):
        assert vars(through_json({"own": own})["own"]) == {"value": 3}


class Runs:
    """Its pickle makes a folder when it is read by the pickle module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_nothing_in_the_text_is_run(tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save(Runs(tmp_path / "made"), file)
    torch.load(io.BytesIO(file.getvalue()), weights_only=False)  # the trap works
    (tmp_path / "made").rmdir()
    with pytest.raises(CheckpointError, match=r"an object of the class posix\.mkdir"):
        decode_client_state({"torch.save": base64.b64encode(file.getvalue()).decode()})
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("text", ["?", 3, "AAAA", base64.b64encode(b"PK\x03\x04 and no more").decode()])
def test_damaged_text_is_an_error(text: Any) -> None:
    with pytest.raises(CheckpointError, match="client_state"):
        decode_client_state({"torch.save": text})
