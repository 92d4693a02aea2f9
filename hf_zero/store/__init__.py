"""Where shards live."""

from hf_zero.store.base import Lease, ShardStore
from hf_zero.store.memory import DeviceStore

__all__ = ["DeviceStore", "Lease", "ShardStore"]
