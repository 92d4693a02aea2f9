"""Threads that ask for Python's lock after Python's end sleep until the process is over, and do not abort it."""

from __future__ import annotations

from hf_zero.native.library import has_library, library


def let_late_threads_sleep() -> None:
    """Let threads that come after the end of Python sleep. The thread that ends Python must call this last.

    Without the library such threads abort the process.
    """
    if has_library():
        function = library().hz_let_late_threads_sleep
        function.argtypes, function.restype = [], None
        function()
