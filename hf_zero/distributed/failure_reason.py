"""Why a rank closed its connections, for the ranks that wait for it. Goes through the key-value store."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hf_zero.errors import DivergenceError, OffloadError, OutOfMemoryError, StateError, ZeroError

_KINDS: dict[str, type[ZeroError]] = {
    one.__name__: one for one in (DivergenceError, OffloadError, OutOfMemoryError, StateError)
}


def publish_reason(group: str, reason: ZeroError) -> None:
    """Before this rank closes its connections in `group`."""
    _store().set(_key(group), f"{type(reason).__name__}\n{reason}")


def published_reason(group: str) -> ZeroError | None:
    """What a rank of `group` published: an error of the same kind and text."""
    try:
        published = _store().get(_key(group)).decode() if _store().check([_key(group)]) else None
    except RuntimeError:  # the store has gone with the process that held it
        return None
    kind, _, text = (published or "").partition("\n")
    return _KINDS[kind](text) if published is not None else None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(group: str) -> str:
    return f"hf_zero/{group}/failure"
