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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from hf_zero.distributed.rank_groups import host_name
from hf_zero.errors import ConfigError

VARIABLE = "GLOO_SOCKET_IFNAME"
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_CONNECTING_S = 10
_MOST_SHOWN = 8
_is_agreed = False


def choose_interface(store: Any, rank: int, world_size: int) -> None:
    """Set GLOO_SOCKET_IFNAME of this process, where the ranks are on several hosts and nobody has set it.

    All ranks must call; the first call of a process counts. It goes through the key-value store: no group is needed.

    Raises:
        ConfigError: On all ranks, where one names an interface that it does not have, has none that leads to the
            other hosts, or cannot connect to another host.
    """
    global _is_agreed
    named = os.environ.get(VARIABLE, "")
    if _is_agreed or (not named and os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)):
        return
    mine = {"host": host_name(), "name": socket.gethostname(), "source": _source(os.environ.get("MASTER_ADDR", ""))}
    mine["problem"] = _problem(named) if named else ""
    everyone = _all_give(store, "interface", rank, world_size, mine)
    _raise_any([f"rank {number}: {one['problem']}" for number, one in enumerate(everyone) if one["problem"]])
    _is_agreed = True
    if all(one["host"] == mine["host"] for one in everyone):
        return
    if not named and (found := _way_to_others(rank, everyone)):
        os.environ[VARIABLE] = found
    _raise_any(_try_to_connect(store, rank, everyone))


def _all_give(store: Any, name: str, rank: int, world_size: int, value: Any) -> list[Any]:
    keys = [f"hf_zero/{name}/{number}" for number in range(world_size)]
    store.set(keys[rank], json.dumps(value))
    return [json.loads(given) for given in store.multi_get(keys)]


def _raise_any(problems: Sequence[str]) -> None:
    if problems:
        advice = f"Set {VARIABLE} on each host to the interface that they share, and open the ports between them."
        raise ConfigError("\n".join((*problems[:_MOST_SHOWN], advice)))


def _way_to_others(rank: int, everyone: Sequence[Mapping[str, str]]) -> str | None:
    mine = everyone[rank]
    # On the host of MASTER_ADDR that name may lead to itself: there the way to another host tells.
    others = [one["source"] for one in everyone if one["source"] and one["host"] != mine["host"]]
    return _interface_of(mine["source"] or next(filter(None, map(_source, others)), None))


def _try_to_connect(store: Any, rank: int, everyone: Sequence[Mapping[str, str]]) -> list[str]:
    """Connect to the next rank on another host, as gloo will; return what keeps ranks apart. All ranks must call.

    gloo itself would try again and again for half an hour.
    """
    world_size, mine = len(everyone), everyone[rank]
    following = ((rank + step) % world_size for step in range(1, world_size))
    other = next(number for number in following if everyone[number]["host"] != mine["host"])
    interface = os.environ.get(VARIABLE, "").partition(",")[0]
    address = _address_of(interface) if interface else ""
    with _listener_at(address) as port:
        store.set(f"hf_zero/listens/{rank}", json.dumps([address, port]))
        there, port = json.loads(store.get(f"hf_zero/listens/{other}"))
        problem = ""
        if not address:
            master = os.environ.get("MASTER_ADDR")
            problem = f"has no interface that leads to the other hosts, of which MASTER_ADDR={master} is one"
        elif there and (why := _why_not_connected(there, port)):
            whom = f"rank {other} on {everyone[other]['name']} ({there})"
            problem = f"({interface}, {address}) cannot connect to {whom}: {why}"
        said = problem and f"rank {rank} on {mine['name']} {problem}; it has {_described()}"
        return [one for one in _all_give(store, "connects", rank, world_size, said) if one]


@contextlib.contextmanager
def _listener_at(address: str) -> Iterator[int]:
    """Listen at a port of this address, where there is one; the system answers, though nothing is accepted."""
    if not address:
        yield 0
        return
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        yield listener.getsockname()[1]


def _why_not_connected(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), timeout=_CONNECTING_S).close()
    except OSError as error:
        return str(error)
    return ""


def choose_interface_to(hosts: Sequence[str]) -> None:
    """Set GLOO_SOCKET_IFNAME, where nobody has, to the interface that leads to the first of the other `hosts`.

    No communication: the ranks have no key-value store yet.
    """
    sources = (_source(host) for host in hosts if host != socket.gethostname())
    if not os.environ.get(VARIABLE) and (interface := _interface_of(next(filter(None, sources), None))):
        os.environ[VARIABLE] = interface


def _problem(named: str) -> str:
    """Say what is wrong with the names of interfaces that the user gave; empty where nothing is."""
    known = psutil.net_if_addrs()
    unknown = [name for name in named.split(",") if not any(one.family in _INTERNET for one in known.get(name, ()))]
    if not unknown:
        return ""
    without = f"has no interface {unknown[0]!r} with an address"
    return f"{VARIABLE}={named}, but {socket.gethostname()} {without}: it has {_described()}"


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


def _address_of(interface: str) -> str:
    """Return the first address of the interface that other hosts may know, as gloo takes it."""
    addresses: list[str] = [one.address for one in psutil.net_if_addrs()[interface] if one.family in _INTERNET]
    return next((one for one in addresses if "%" not in one), addresses[0])


def _described() -> str:
    return ", ".join(
        f"{name} ({', '.join(one.address for one in addresses if one.family in _INTERNET) or 'no address'})"
        for name, addresses in psutil.net_if_addrs().items()
    )
