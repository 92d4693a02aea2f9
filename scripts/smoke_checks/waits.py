"""The places where the host waited for the device: counted by place, on CUDA and on the lag device.

CUDA's mode "error" would end a run at the first place; here the mode "warn" names all of them, and a place that is not
in EXPECTED fails the run. Not all waits are seen: the mode knows of blocking copies and streams, not of events.
"""

from __future__ import annotations

import collections
import contextlib
import os
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hf_zero
from smoke_checks.place import LAG

Waits = collections.Counter[str]  # "file function" -> how often

# Places of hf_zero that may wait in a step, and why. The first is the vote: it is due once a step.
VOTE = "step_ballot.py _on_host"
EXPECTED = {
    VOTE: "the norm and what the ranks agree on",
    "flat_param.py end_gather": "parameters on disk: staging memory goes back when the device has read it",
    "shard.py copy_from": "offload of one of states and parameters",
    "host_state.py run": "an update begins once its gradients are on the host, on a thread of its own",
    "param_writer.py open": "it writes where the device has read the last one's parameters",
    "shard.py wait_for_readers": "the same, where it writes into the shard",
}
# Copies from and to host memory that is not pinned.
PAGEABLE = ("copy_stream.py _copy", "shard.py copy_parts_to")


def can_count(device: torch.device) -> bool:
    return device.type == LAG or hasattr(torch.get_device_module(device), "set_sync_debug_mode")


@contextlib.contextmanager
def counted(device: torch.device) -> Iterator[Waits]:
    """Count the waits inside the block; the counter is empty where `can_count` is false."""
    found: Waits = collections.Counter()
    if device.type == LAG:
        from tests.lag.device import take_syncs

        take_syncs()
        yield found
        found.update(_in_words(where) for _, where in take_syncs())
    elif can_count(device):
        yield from _warned(torch.get_device_module(device), found)
    else:
        yield found


def _warned(module: Any, found: Waits) -> Iterator[Waits]:
    def show(message: Warning | str, *rest: Any, **named: Any) -> None:
        if "called a synchronizing" in str(message):
            found[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        before = module.get_sync_debug_mode()
        module.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            module.set_sync_debug_mode(before)


def _in_words(where: str) -> str:
    """ "file.py:12 function < ..." of the lag device, as "file function"."""
    innermost = where.split(" < ")[0]
    return f"{innermost.partition(':')[0]} {innermost.rpartition(' ')[2]}"


def _place() -> str:
    """The innermost frame that belongs to neither torch nor this file."""
    of_torch = os.path.dirname(torch.__file__)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((of_torch, __file__)) and "warnings" not in frame.filename:
            return f"{os.path.basename(frame.filename)} {frame.name}"
    return "nobody knows where"


def wrong(found: Waits, *, offloaded: bool, pinned: bool) -> str:
    """The differences from EXPECTED, in words; empty if none. Waits of the model's own code do not count."""
    allowed = set(EXPECTED) if offloaded else {VOTE}
    if offloaded and not pinned:
        allowed.update(PAGEABLE)
    if other := {place: count for place, count in _of_hf_zero(found).items() if place not in allowed}:
        return f"the host waits at {other}"
    if found[VOTE] > 1:
        return f"the vote waits {found[VOTE]} times in a step"
    return ""


def in_words(found: Waits) -> str:
    """The vote, others of hf_zero, those of the model's code."""
    ours = sum(_of_hf_zero(found).values())
    return f"{found[VOTE]} for the vote, {ours - found[VOTE]} more, {sum(found.values()) - ours} of the model's code"


def _of_hf_zero(found: Waits) -> dict[str, int]:
    files = {file.name for file in Path(hf_zero.__file__).parent.rglob("*.py")} - {"__init__.py"}
    return {place: count for place, count in found.items() if place.split(" ")[0] in files}
