"""The instruction set of the computations of the library, which HF_ZERO_SIMD names, and their errors."""

from __future__ import annotations

import os

from hf_zero.errors import ConfigError, NativeError
from hf_zero.native.library import library

SIMD_VARIABLE = "HF_ZERO_SIMD"
SIMD_LEVELS = ("default", "v3", "v4")  # numbered as hz_simd: baseline, AVX2, AVX-512


def simd_level() -> int:
    """HF_ZERO_SIMD as a number, or -1: the best that the CPU has.

    Raises:
        ConfigError: The CPU lacks it, or it is no level.
    """
    named = os.environ.get(SIMD_VARIABLE)
    if not named:
        return -1
    best = library().hz_simd_level()
    if named not in SIMD_LEVELS[: best + 1]:
        raise ConfigError(
            f"{SIMD_VARIABLE}={named!r}: this CPU has {', '.join(SIMD_LEVELS[: best + 1])}. "
            "Unset it: the results are the same bits at every level"
        )
    return SIMD_LEVELS.index(named)


def raise_errno(code: int, what: str) -> None:
    """Raise NativeError if `what` returned an errno: it could not have its threads or its memory."""
    if code > 0:
        raise NativeError(
            f"{what} failed before it changed anything: {os.strerror(code)}. It could not start its threads "
            "or allocate memory: lower HF_ZERO_CPU_THREADS, or raise the limit on processes (ulimit -u)."
        )
