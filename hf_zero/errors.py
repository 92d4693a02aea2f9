"""The errors hf_zero raises for users, one class per kind of mistake.

A message names the rank (where ranks can differ), the parameter or key, what was expected, and what to do.
Broken internal invariants raise AssertionError instead: they are bugs of hf_zero, not of the user.
"""

from __future__ import annotations


class ZeroError(RuntimeError):
    """Base of all errors that hf_zero raises on purpose."""


class ConfigError(ZeroError, ValueError):
    """The configuration is wrong; the message lists every problem at once with its remedy."""


class CheckpointError(ZeroError):
    """A checkpoint folder is missing, incomplete, damaged or does not fit the model; the message names the file."""


class NativeError(ZeroError):
    """The native library is missing or failed; the message gives the command that builds it."""


class OffloadError(ZeroError):
    """Offloaded state cannot be read or written; the message names the path, the offset and the system's reason."""


class OutOfMemoryError(ZeroError):
    """A rank ran out of device memory. accelerate's find_executable_batch_size knows it by its text."""


class StateError(ZeroError):
    """A call came in an order that cannot be right, such as a write to a sharded parameter."""


class DivergenceError(ZeroError):
    """Ranks disagree: they built different models, ran different code, or one of them stopped."""
