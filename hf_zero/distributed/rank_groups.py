"""Groups of consecutive ranks, usually those of one host: what is inside of one travels apart from what leaves it."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from hf_zero.distributed.environment import host_id
from hf_zero.errors import ConfigError

KEY = "zero_optimization.sharding_group"


@dataclass(frozen=True)
class RankGroups:
    """The groups that the ranks of an engine form, seen from one of them."""

    size: int  # ranks of a group
    inside: tuple[int, ...]  # the ranks of this rank's group, in order
    across: tuple[int, ...]  # the ranks at this rank's place in each group, in the order of groups
    # Each group has all shards, one for each of its ranks; else there is one for each of all ranks.
    replicates: bool = False

    @classmethod
    def of(cls, rank: int, world_size: int, size: int, *, replicates: bool = False) -> RankGroups:
        return cls.among(range(world_size), rank, size, replicates=replicates)

    @classmethod
    def among(cls, ranks: Sequence[int], rank: int, size: int, *, replicates: bool = False) -> RankGroups:
        """Return the groups of `size` that `ranks` form."""
        place = ranks.index(rank)
        first = place - place % size
        return cls(size, tuple(ranks[first : first + size]), tuple(ranks[place % size :: size]), replicates)

    @classmethod
    @functools.lru_cache
    def of_hosts(cls, ranks: tuple[int, ...], rank: int, per_host: int) -> RankGroups | None:
        """Return the groups that the ranks of each host form among `ranks`; None where none has several of them, where
        all are on one, or where one has more than another.

        Args:
            per_host: The ranks of a host, which are consecutive.
        """
        size = ranks_per_host([one // per_host for one in ranks])
        return cls.among(ranks, rank, size) if size is not None and 1 < size < len(ranks) else None

    @property
    def row(self) -> tuple[int, ...]:
        """The shards that the ranks across have between them, by number."""
        return self.across[:1] if self.replicates else self.across

    @property
    def number(self) -> int:
        """The number of shards in a row."""
        return len(self.row)


def host_name() -> str:
    """Return what tells this host, or a container with a network of its own, from the others."""
    with contextlib.suppress(OSError):
        return host_id("net")
    return socket.gethostname()


def ranks_per_host(hosts: Sequence[Hashable]) -> int | None:
    """Return the number of consecutive ranks of each host, None if they differ or are not consecutive.

    Args:
        hosts: What tells the host of each rank from others, in rank order.
    """
    size = len(hosts) // len(set(hosts))
    firsts = hosts[::size]
    return size if list(hosts) == [host for host in firsts for _ in range(size)] else None


def group_size(wanted: str | int, hosts: Sequence[str]) -> int:
    """Return the number of ranks of a group.

    Args:
        wanted: The value of the key: "all", "host" or a number.
        hosts: What tells the host of each rank from others, in rank order.
    Raises:
        ConfigError: Groups of that size do not exist; the same on all ranks.
    """
    count = len(hosts)
    if wanted == "all":
        return count
    if wanted != "host":
        size = int(wanted)
        if count % size:
            fitting = [number for number in range(1, count + 1) if count % number == 0]
            raise ConfigError(
                f"{KEY} = {size}: {count} ranks do not form groups of {size}.\nWrite one of "
                f'{", ".join(map(str, fitting))}, or "all", or start as many ranks as fit.'
            )
        return size
    size_on_each = ranks_per_host(hosts)
    if size_on_each is not None:
        return size_on_each
    ranks_of = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)}
    found = list(ranks_of.values())
    if len({len(ranks) for ranks in found}) > 1:
        counted = ", ".join(f"{len(ranks)} (rank {ranks[0]} on)" for ranks in found)
        raise ConfigError(
            f'{KEY} = "host": the hosts have different numbers of ranks: {counted}.\nStart as many on each host, '
            'or write "all", or a number of ranks that divides all of these.'
        )
    raise ConfigError(
        f'{KEY} = "host": the ranks of a host are not consecutive: {found}.\nNumber them host by host, as torchrun '
        'does (SLURM: --distribution=block; MPI: --map-by slot), or write "all".'
    )


def group_of_mesh(mesh: DeviceMesh, world_size: int) -> int | str:
    """Return the value of the key for a mesh as FSDP2 takes it: shards, or replicas of shards, (replicas, shards).

    Raises:
        ConfigError: The mesh has other ranks or dimensions than that, or says that nothing is sharded.
    """
    ranks, names = mesh.mesh, mesh.mesh_dim_names or ()
    if ranks.ndim > 2 or ranks.flatten().tolist() != list(range(world_size)):
        raise ConfigError(
            f"the mesh holds the ranks {ranks.tolist()}: expected all {world_size} of them in order, in one dimension "
            "(shards) or two (replicas, shards).\nMake it by init_device_mesh(device, (replicas, shards))."
        )
    if names == ("dp_replicate",):
        raise ConfigError(
            "the mesh has the dimension dp_replicate alone: expected one to shard over.\n"
            "Set dp_shard_size (of ParallelismConfig), or leave the mesh out: all ranks share the states then."
        )
    size: int = ranks.shape[-1]
    return "all" if size == world_size else size
