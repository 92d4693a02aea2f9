"""Digests that travel in a vote, next to numbers."""

from __future__ import annotations

import hashlib

_BITS = 52  # exact in a float64


def digest_of(content: bytes) -> float:
    """An integer below 2**52."""
    return float(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> (64 - _BITS))
