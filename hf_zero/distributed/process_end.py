"""The end of this process: which threads end before Python does, and in which order.

[Note: Threads at Python's end]
A thread that asks for Python's lock after Python has ended is ended by Python, inside of C++, which aborts the
process: "terminate called without an active exception", status 134 for work that was right. It asks where a call of
torch returns to Python, and where it frees a tensor or a callback that Python has seen. Who holds what is a table in
CONTRIBUTING.md, "How a process ends". So the last that Python does is, in this order:

    1  saves in the background, then threads of ours that call torch, finish what they are at
    2  the engines' groups are destroyed, then the default group: their destructors join gloo's threads
    3  whoever still refers to a group has kept its threads, and autograd has its own: they come to rest
    4  what is woken later all the same, by another rank's message, sleeps until the process is over

An exception that ends the process leaves out the groups: other ranks must not hear of it, and end, before the launcher
sees this one.

[Note: A device's groups after an error]
The destructor of NCCL's group waits for its watchdog, which sleeps for a minute after an error, and for kernels whose
other ranks may never come, while those wait for this process to end. So where an exception ends a process that has
such a group, the process ends without destructors. Before that the other ranks get a second to read why: the
key-value store may live in this process, and a launcher that sees it end kills theirs. Without such a group they get
it where the store may live here.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import logging
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from hf_zero.distributed.timeouts import TIMEOUTS
from hf_zero.native.late_threads import let_late_threads_sleep

_TASKS = Path("/proc/self/task")  # Linux
# The threads of torch that free what Python has seen: gloo's collectives, and a device's autograd.
_HOLDERS = ("pt_gloo_runloop", "pt_autograd")
_REST_WITHIN_S = 10.0
# Longer than what a thread waits for Python's lock before it asks again: one that waits for it shows.
_LOOK_EVERY_S = 0.01


class Turn(enum.IntEnum):
    """The order in which things end, at Python's end."""

    SAVES = 0
    UPDATES = 1
    LINKS = 2
    WORLD = 3


class EndsWithPython(Protocol):
    def end_with_python(self) -> None: ...


class TellsOthers(Protocol):
    def tell_of_error(self, error: BaseException) -> None: ...


class _DefaultGroup:
    """The process group of all ranks, where hf_zero joined them, or uses it."""

    def end_with_python(self) -> None:
        if dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()


_DEFAULT_GROUP = _DefaultGroup()
_HAS_DEVICE_GROUPS = False
_TURNS: dict[Turn, weakref.WeakSet[EndsWithPython]] = {turn: weakref.WeakSet() for turn in Turn}
_TELL: weakref.WeakSet[TellsOthers] = weakref.WeakSet()


def _forget() -> None:
    for live in _TURNS.values():
        live.clear()
    _TELL.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)  # it has none of the threads


def end_with_python(one: EndsWithPython, turn: Turn) -> None:
    """Call `one.end_with_python` at Python's end, unless `one` is garbage by then."""
    _TURNS[turn].add(one)


def tell_others_of_errors(one: TellsOthers) -> None:
    """Call `one.tell_of_error` when an error ends this process, unless `one` is garbage by then."""
    _TELL.add(one)


def tell_others(error: BaseException) -> None:
    """Let the other ranks know that `error` ends this process."""
    for one in list(_TELL):
        with contextlib.suppress(RuntimeError, ValueError):  # the key-value store has gone
            one.tell_of_error(error)


def leave_cleanly_at_exit() -> None:
    """Destroy the default group at Python's end, whoever made it."""
    end_with_python(_DEFAULT_GROUP, Turn.WORLD)


def end_at_once_on_errors() -> None:
    """This process has a group of a device: see [Note: A device's groups after an error]."""
    global _HAS_DEVICE_GROUPS
    _HAS_DEVICE_GROUPS = True


@atexit.register
def _end() -> None:
    """See [Note: Threads at Python's end]."""
    fails = hasattr(sys, "last_value")
    if fails and sys.last_value is not None:
        tell_others(sys.last_value)
    for turn in Turn:
        for one in list(_TURNS[turn]) if turn < Turn.LINKS or not fails else []:
            one.end_with_python()
    if fails and _may_hold_store() and not _HAS_DEVICE_GROUPS:
        time.sleep(2 * TIMEOUTS.look_every)
    if fails and _HAS_DEVICE_GROUPS:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # a pipe that is closed already
                stream.flush()
        time.sleep(2 * TIMEOUTS.look_every)
        os._exit(1)
    _wait_until_at_rest()
    let_late_threads_sleep()


def _may_hold_store() -> bool:
    """Whether other ranks may lose the key-value store, and with it what ended this one, when this process ends."""
    is_first = dist.is_initialized() and dist.get_rank() == 0 and dist.get_world_size() > 1
    return is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _wait_until_at_rest() -> None:
    """Return when all threads that may hold objects of Python sleep, and have since the look before."""
    deadline = time.monotonic() + _REST_WITHIN_S
    before: dict[str, list[str]] | None = None
    while (now := _holders()) and time.monotonic() < deadline:
        if now == before and all(status[0].startswith("S") for status in now.values()):
            return
        before = now
        time.sleep(_LOOK_EVERY_S)  # without Python's lock, which they may wait for


def _holders() -> dict[str, list[str]]:
    """Return, for each thread of _HOLDERS, its state, and how often it has slept and was made to wait."""
    found = {}
    for task in os.listdir(_TASKS) if _TASKS.is_dir() else ():
        with contextlib.suppress(OSError):  # it has ended
            lines = [line.partition(":\t") for line in (_TASKS / task / "status").read_text().splitlines()]
            if lines[0][2].startswith(_HOLDERS):
                found[task] = [value for name, _, value in lines if name == "State" or name.endswith("ctxt_switches")]
    return found
