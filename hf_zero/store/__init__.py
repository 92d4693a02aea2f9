"""Where shards live."""

from hf_zero.store.base import Lease, ShardStore, StoreStats
from hf_zero.store.disk import DiskStore
from hf_zero.store.host import HostStore
from hf_zero.store.memory import DeviceStore, MemoryStore
from hf_zero.store.staging import StagingPool
from hf_zero.store.swap import SwapFolder

__all__ = [
    "DeviceStore",
    "DiskStore",
    "HostStore",
    "Lease",
    "MemoryStore",
    "ShardStore",
    "StagingPool",
    "StoreStats",
    "SwapFolder",
]
