"""Decides on which store every flat parameter keeps its shards, and makes the stores.

| offload_optimizer | master weights and moments | update | | offload_param | parameter shard at stage 3 |
|---|---|---|---|---|---|
| none | device | torch | | none | device |
| cpu | host | native, or torch | | cpu | host |
| nvme | disk | native | | nvme | host up to max_in_cpu elements, then disk |
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_zero.config.conditions import MAX_TILE_NUMEL
from hf_zero.config.resolved import Aio, OffloadOptimizer, OffloadParam, ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.errors import OffloadError, StateError
from hf_zero.layout import UnitLayout
from hf_zero.native.host_memory import page_rounded
from hf_zero.native.pinning import wait_for_copies
from hf_zero.storage import DeviceStore, DiskStore, HostStore, ShardStore, StagingPool, StoreStats, SwapFolder
from hf_zero.storage.copy_stream import CopyStreams

# Master and two moments: what a tile of the native update has on its store.
_STATES = 3


def master_dtype_of(dtype: torch.dtype, *, as_params: bool) -> torch.dtype:
    """The type in which a parameter is updated: its own, or fp32 where `as_params` is false and it is not fp64."""
    return dtype if as_params or dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class FlatParamSpec:
    """A flat parameter that is to be made."""

    layout: UnitLayout
    dtype: torch.dtype
    on_demand: bool
    scaled: bool = False  # gradients are kept and reduced in 8 bits, with a scale for each parameter


@dataclass(frozen=True)
class Placement:
    """The stores of one flat parameter between uses, and how ranks share it after an update."""

    param: ShardStore  # its shard, where parameters are unsharded around their use only
    master: ShardStore  # master weights, and the moments of a native update
    copies: CopyStreams  # for what goes between host and device; one for all flat parameters
    native: bool  # a rule of hf_zero's own updates the masters; else torch does, and they stay in memory
    tile_numel: int
    sub_group_numel: int = 1 << 62  # elements that one call of a torch optimizer updates
    broadcasts: bool = False  # what is never sharded comes from each owner by a broadcast (`allgather_partitions`)
    scaled: bool = False  # masters and moments have 8 and 16 bits: ScaledShard
    masters_as_params: bool = False  # see master_dtype_of


@dataclass(frozen=True)
class OffloadSettings:
    """The part of the configuration that decides where shards live."""

    param: OffloadParam
    optimizer: OffloadOptimizer
    aio: Aio
    sub_group_numel: int  # `sub_group_size`
    native: bool  # offloaded states are updated by native code, not by torch on the host
    broadcasts: bool  # `allgather_partitions` is false
    scaled: bool = False  # masters and moments of what has 8-bit gradients have 8 and 16 bits
    masters_as_params: bool = False  # see master_dtype_of

    @classmethod
    def of(cls, config: ResolvedConfig) -> OffloadSettings:
        zero = config.zero
        return cls(
            param=zero.offload_param,
            optimizer=zero.offload_optimizer,
            aio=config.aio,
            sub_group_numel=zero.sub_group_size,
            # torch's optimizers keep their state in memory.
            native=config.force_native_adam or zero.offload_optimizer.medium.needs_folder,
            broadcasts=not zero.allgather_partitions,
            scaled=config.fp8.has_scaled_states,
            masters_as_params=config.bf16_masters,
        )


class Placements:
    """The stores of one engine. All ranks must construct it; what goes wrong on one rank is raised on all of them.

    `host` (gradients, updated parameters) and `host_params` (parameter shards) are what the device copies from and to,
    so they are pinned: `pin_memory` of offload_optimizer and of offload_param says so.
    `states` is what the processor alone works on: masters and moments of a native update, averages. To pin those
    too would take minutes at the start and most of what a system allows.
    """

    def __init__(self, settings: OffloadSettings, comm: Comm, flat_specs: Sequence[FlatParamSpec]) -> None:
        self._settings = settings
        self._tile = max(1, min(settings.sub_group_numel, MAX_TILE_NUMEL))  # elements
        self._comm = comm
        self.device = DeviceStore(comm.device)
        self.copies = self._make_copies()
        self.host = self._make_host(pin=settings.optimizer.pin_memory)
        self.host_params = self._make_host(pin=settings.param.pin_memory)
        self.states = self._make_host(pin=False)
        self._hosts = [self.host, self.host_params, self.states]
        self._folders: dict[str, SwapFolder] = {}
        self.disks: dict[str, ShardStore] = {}  # "optimizer", "parameters"
        self._offloaded = self._choose_offloaded(flat_specs)
        self._on_disk = self._choose_on_disk(flat_specs)
        self._masters: ShardStore = self.states
        self._params: ShardStore = self.host_params
        work = functools.partial(self._make_disks, flat_specs)
        comm.agree("offload folders", work, OffloadError)
        # A model that is forgotten without a teardown takes its files and pinned memory with it. At exit the folders
        # remove themselves, and memory goes with the process.
        stores = (self._hosts, self.disks, self._folders)
        self._closing = weakref.finalize(self, _close, comm.device, self.copies, *stores)
        self._closing.atexit = False

    # ---------------------------------------------------------------- who lives where
    def placement_of(self, flat_spec: FlatParamSpec) -> Placement:
        offloaded = flat_spec.layout.name in self._offloaded
        scaled = flat_spec.scaled and self._settings.scaled
        if not flat_spec.on_demand or self._settings.param.medium.is_device:
            param: ShardStore = self.device
        else:
            param = self._params if flat_spec.layout.name in self._on_disk else self.host_params
        return Placement(
            param=param,
            master=self._master_store(param) if offloaded else self.device,
            native=scaled or (offloaded and self._settings.native),
            copies=self.copies,
            tile_numel=self._tile,
            sub_group_numel=max(1, self._settings.sub_group_numel),
            broadcasts=self._settings.broadcasts,
            scaled=scaled,
            masters_as_params=self._settings.masters_as_params,
        )

    def _master_store(self, param: ShardStore) -> ShardStore:
        """Return the store of offloaded masters. Those of torch are copied to parameters after every step."""
        copied = not self._settings.native and param.is_on_device
        return self.host if copied else self._masters

    def admit(self, flat_specs: Sequence[FlatParamSpec]) -> None:
        """Find places for flat parameters that are made later and replace frozen ones.

        Raises StateError where masters are on disk: the staging memory was sized for what was trained at first.
        """
        if self._settings.optimizer.medium.needs_folder:
            raise StateError(
                "parameters began to require gradients while optimizer states are on disk, which have no room for "
                "them.\nLet them require gradients before the model is handed over, or use offload_optimizer cpu."
            )
        if not self._settings.optimizer.medium.is_device:
            self._offloaded |= {flat_spec.layout.name for flat_spec in flat_specs if flat_spec.layout.trainable}
        if self._on_disk:
            self._on_disk |= {flat_spec.layout.name for flat_spec in flat_specs}

    def _choose_offloaded(self, flat_specs: Sequence[FlatParamSpec]) -> frozenset[str]:
        """Return the names of layouts whose masters leave the device: `ratio` of the elements, none in part."""
        if self._settings.optimizer.medium.is_device:
            return frozenset()
        trainable = [flat_spec.layout for flat_spec in flat_specs if flat_spec.layout.trainable]
        wanted = self._settings.optimizer.ratio * sum(layout.numel for layout in trainable)
        chosen = set()
        so_far = 0
        for layout in trainable:
            if so_far < wanted:
                chosen.add(layout.name)
                so_far += layout.numel
        return frozenset(chosen)

    def _choose_on_disk(self, flat_specs: Sequence[FlatParamSpec]) -> frozenset[str]:
        """Return the names of layouts whose parameter shard is on disk: what `max_in_cpu` elements do not hold."""
        if not self._settings.param.medium.needs_folder:
            return frozenset()
        chosen = set()
        in_memory = 0
        for flat_spec in flat_specs:
            numel = flat_spec.layout.shard_numel + self._row_numel(flat_spec.layout)
            if flat_spec.on_demand and in_memory + numel > self._settings.param.max_in_cpu:
                chosen.add(flat_spec.layout.name)
            elif flat_spec.on_demand:
                in_memory += numel
        return frozenset(chosen)

    def _row_numel(self, layout: UnitLayout) -> int:
        """The elements that a rank keeps for its group beside its shard; see [Note: Groups] in flat_param.py."""
        groups = self._comm.groups
        return 0 if groups is None or groups.replicates else layout.padded_numel // groups.size

    # ---------------------------------------------------------------- stores
    def _make_disks(self, flat_specs: Sequence[FlatParamSpec]) -> None:
        """The stores for masters and moments, and for parameter shards, where they are not the host's memory."""
        optimizer, param = self._settings.optimizer, self._settings.param
        if optimizer.medium.needs_folder:
            one_tile = _STATES * page_rounded(self._state_tile_bytes(flat_specs))
            self._masters = self.disks["optimizer"] = self._make_disk(
                optimizer.nvme_path,
                "optimizer",
                optimizer.buffer_count * one_tile,
                pin=False,
                preallocate=not optimizer.fast_init,
                read_ahead=optimizer.pipeline_read,
                write_behind=optimizer.pipeline_write,
            )
        if self._on_disk:
            mine = [spec for spec in flat_specs if spec.layout.name in self._on_disk]
            numels = [max(spec.layout.shard_numel, self._row_numel(spec.layout)) for spec in mine]
            largest = max(numel * spec.dtype.itemsize for numel, spec in zip(numels, mine, strict=True))
            one = page_rounded(min(largest, param.buffer_size * max(spec.dtype.itemsize for spec in mine)))
            self._params = self.disks["parameters"] = self._make_disk(
                param.nvme_path, "parameters", param.buffer_count * one, pin=param.pin_memory, preallocate=True
            )

    def _state_tile_bytes(self, flat_specs: Sequence[FlatParamSpec]) -> int:
        mine = [spec for spec in flat_specs if spec.layout.name in self._offloaded]
        as_params = self._settings.masters_as_params
        widths = [master_dtype_of(spec.dtype, as_params=as_params).itemsize for spec in mine]
        sizes = (min(spec.layout.shard_numel, self._tile) * n for spec, n in zip(mine, widths, strict=True))
        return max(sizes, default=1)

    def _make_copies(self) -> CopyStreams:
        return CopyStreams(self._comm.device)

    def _make_host(self, *, pin: bool) -> HostStore:
        return HostStore(self._comm.device, pin=pin)

    def _make_disk(self, path: str | None, name: str, pool_bytes: int, *, pin: bool, **options: bool) -> ShardStore:
        pool = StagingPool(max(pool_bytes, 1), device=self._comm.device, pin=pin)
        return DiskStore(self._folder(path), name, aio=self._settings.aio, pool=pool, **options)

    def _folder(self, path: str | None) -> SwapFolder:
        assert path is not None  # the configuration was checked
        if path not in self._folders:
            self._folders[path] = SwapFolder(path, self._comm.rank)
        return self._folders[path]

    def lend_host(self, *, pin: bool) -> HostStore:
        """Make one more store on the host, for what leaves the device until `take_back`."""
        self._hosts.append(self._make_host(pin=pin))
        return self._hosts[-1]

    def take_back(self, lent: HostStore) -> None:
        """Free a store that `lend_host` has made, and all that is in it."""
        self._hosts.remove(lent)
        lent.close()

    def host_usage(self) -> dict[str, int]:
        """Bytes under each key in the host's memory."""
        return {key: nbytes for host in self._hosts for key, nbytes in host.usage().items()}

    def host_bytes(self) -> int:
        """Bytes in the host's memory, without copies that wait to be published."""
        return sum(size for key, size in self.host_usage().items() if not key.endswith("/staged"))

    def disk_bytes(self) -> int:
        return sum(sum(disk.usage().values()) for disk in self.disks.values())

    def stats(self) -> dict[str, StoreStats]:
        """Return the counters of the stores on disk: "optimizer", "parameters"."""
        return {name: disk.stats() for name, disk in self.disks.items()}

    @property
    def closed(self) -> bool:
        return not self._closing.alive

    def close(self) -> None:
        """Forget what is on the host and on disk; unpin the memory and remove the files."""
        self._closing()


def _close(
    device: torch.device,
    copies: object,
    hosts: Sequence[ShardStore],
    disks: dict[str, ShardStore],
    folders: dict[str, SwapFolder],
) -> None:
    """`copies` is here to live until the device has been waited for, with what it keeps of copies under way."""
    wait_for_copies(device)
    for host in hosts:
        host.close()
    for disk in disks.values():
        disk.close()
    for folder in folders.values():
        folder.close()
