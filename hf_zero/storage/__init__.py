"""Stores of shards: on the device, on the host, on a disk."""

from hf_zero.storage.base import BorrowedTensors, ShardStore, StagingStore, StoreStats
from hf_zero.storage.disk import DiskStore
from hf_zero.storage.memory import DeviceStore, HostStore, MemoryStore
from hf_zero.storage.staging_pool import StagingPool
from hf_zero.storage.swap_folder import SwapFolder

__all__ = [
    "BorrowedTensors",
    "DeviceStore",
    "DiskStore",
    "HostStore",
    "MemoryStore",
    "ShardStore",
    "StagingPool",
    "StagingStore",
    "StoreStats",
    "SwapFolder",
]
