"""The network interface over which gloo connects ranks of several hosts.

gloo listens at the address that the host's own name leads to. After an installation of Debian or Ubuntu, and in many
containers, that is 127.0.1.1, where no other host arrives, and the job waits without a word. NCCL looks for an
interface by itself; for gloo the one on the way to the other hosts is named before its first group is made.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

import psutil

from hf_zero.distributed.rank_groups import host_name
from hf_zero.errors import ConfigError

VARIABLE = "GLOO_SOCKET_IFNAME"
_is_agreed = False


def choose_interface(store: Any, rank: int, world_size: int) -> None:
    """Set GLOO_SOCKET_IFNAME of this process, where the ranks are on several hosts and nobody has set it.

    All ranks must call; the first call of a process counts. It goes through the key-value store: no group is needed.

    Raises:
        ConfigError: On all ranks, where one names an interface that it does not have, or has none that leads to the
            other hosts.
    """
    global _is_agreed
    named = os.environ.get(VARIABLE, "")
    if _is_agreed or (not named and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)):
        return
    mine = {"host": host_name(), "name": socket.gethostname(), "source": _source(os.environ.get("MASTER_ADDR", ""))}
    mine["problem"] = _problem(named) if named else ""
    keys = [f"hf_zero/interface/{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps(mine))
    everyone = [json.loads(given) for given in store.multi_get(keys)]
    if problems := [f"rank {number}: {one['problem']}" for number, one in enumerate(everyone) if one["problem"]]:
        raise ConfigError("\n".join(problems))
    _is_agreed = True
    if named or all(one["host"] == mine["host"] for one in everyone):
        return
    # On the host of MASTER_ADDR that name may lead to itself: there the way to another host tells.
    others = [one["source"] for one in everyone if one["source"] and one["host"] != mine["host"]]
    interface = _interface_of(mine["source"] or next(filter(None, map(_source, others)), None))
    if interface is None:
        raise ConfigError(
            f"rank {rank} on {mine['name']} has no interface that leads to the other hosts: MASTER_ADDR is "
            f"{os.environ.get('MASTER_ADDR')}, and this host has {_described()}.\nSet {VARIABLE} on each host to the "
            "interface that they share."
        )
    os.environ[VARIABLE] = interface


def choose_interface_to(hosts: Sequence[str]) -> None:
    """Set GLOO_SOCKET_IFNAME, where nobody has, to the interface that leads to the first of the other `hosts`.

    No communication: the ranks have no key-value store yet.
    """
    sources = (_source(host) for host in hosts if host != socket.gethostname())
    if not os.environ.get(VARIABLE) and (interface := _interface_of(next(filter(None, sources), None))):
        os.environ[VARIABLE] = interface


def _problem(named: str) -> str:
    """Say what is wrong with the names of interfaces that the user gave; empty where nothing is."""
    unknown = [name for name in named.split(",") if name not in psutil.net_if_addrs()]
    if not unknown:
        return ""
    return f"{VARIABLE}={named}, but {socket.gethostname()} has no interface {unknown[0]!r}: it has {_described()}"


def _source(target: str) -> str | None:
    """Return the address of this host from which it reaches `target`; None where that is the loopback, or unknown."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # sends nothing: it asks for the route
                source: str = probe.getsockname()[0]
                if not ipaddress.ip_address(source.partition("%")[0]).is_loopback:
                    return source
    return None


def _interface_of(address: str | None) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if address in (one.address.partition("%")[0] for one in addresses):
            return str(name)
    return None


def _described() -> str:
    internet = (socket.AF_INET, socket.AF_INET6)
    return ", ".join(
        f"{name} ({', '.join(one.address for one in addresses if one.family in internet) or 'no address'})"
        for name, addresses in psutil.net_if_addrs().items()
    )
