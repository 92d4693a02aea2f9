"""Waits for stores, which the product never does: a save keeps contents, and the end of training drops them."""

from __future__ import annotations

from hf_zero.storage import DiskStore, ShardStore


def flush(store: ShardStore) -> None:
    """Return when every released write has reached the medium; raise what a transfer of a key has failed with."""
    if not isinstance(store, DiskStore):
        return
    for flight in list(store._writes):
        store._end_write(flight)
    with store._lock:
        store._check_file()
        for entry in store._entries.values():
            entry.check()
