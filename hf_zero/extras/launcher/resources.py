"""The hosts, and the slots of each, that a job gets: hostfile, --include, --exclude, --num_nodes, --num_gpus.

A slot is one process and, where the host has GPUs, the GPU of that number. The grammar is DeepSpeed's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from hf_zero.extras.launcher.launch_errors import LaunchUsageError

Slots = dict[str, list[int]]  # the chosen slots of each host, in the order of the hostfile

# max_slots is Open MPI's, whose hostfiles these are; it has no effect here.
_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)(\s+max[_-]slots=\d+)?\s*(#.*)?", re.ASCII)
# A name or an IPv6 address, with or without a user. ssh, pdsh and srun take it for a host and for nothing else: it is
# no option ("-o..."), no list or range of hosts, and no shell finds anything to expand in it.
_HOST = re.compile(r"(\w[\w.-]*@)?(\w[\w.-]*|[\dA-Fa-f]*:[\dA-Fa-f:.]*)", re.ASCII)
MOST_SLOTS = 4096  # of one host; every slot is a process


def check_host(host: str, where: str) -> None:
    """Raise LaunchUsageError, which begins with `where`, unless `host` can be the name or address of a host."""
    if not _HOST.fullmatch(host):
        raise LaunchUsageError(
            f"{where}: {host!r} is no host: expected a name or an address of letters, digits, '.', '-', '_' (and ':' "
            "in IPv6), which does not begin with '-'"
        )


def slot_number(digits: str, where: str) -> int:
    """`digits` as a number of slots, or of one slot. Raises LaunchUsageError where no host has so many."""
    if len(digits) > 9 or int(digits) > MOST_SLOTS:
        raise LaunchUsageError(f"{where}: {digits[:20]} is too much: a host has at most {MOST_SLOTS} slots")
    return int(digits)


def read_hostfile(path: str | Path) -> dict[str, int] | None:
    """Return the number of slots of each host, in the file's order; None where there is no such file.

    Raises:
        LaunchUsageError: A line is malformed, names no host, a host stands there twice, or there is no host at all.
    """
    path = Path(path)
    if not path.is_file():
        return None
    return parse_hostfile(path.read_text(encoding="utf-8", errors="replace").splitlines(), str(path))


def parse_hostfile(lines: Iterable[str], name: str = "hostfile") -> dict[str, int]:
    """The same for lines that were read already; `name` stands in messages."""
    hosts: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None:
            raise LaunchUsageError(f"{name}, line {number}: {line!r} is not of the form 'worker-1 slots=8'")
        where = f"{name}, line {number}"
        host, slots = entry[1], slot_number(entry[2], where)
        check_host(host, where)
        if host in hosts:
            raise LaunchUsageError(f"{where}: host {host} stands there twice; add its slots up in one line")
        if slots < 1:
            raise LaunchUsageError(f"{where}: host {host} has no slots; remove the line")
        hosts[host] = slots
    if not hosts:
        raise LaunchUsageError(f"{name} names no host; write one 'worker-1 slots=8' per line")
    return hosts


def parse_node_specs(text: str, option: str) -> Slots:
    """`worker-0@worker-1:0,2` as {host: slots}; an empty list means all slots of the host."""
    chosen: Slots = {}
    for spec in text.split("@"):
        host, colon, numbers = spec.partition(":")
        if not host or (colon and not re.fullmatch(r"\d+(,\d+)*", numbers, re.ASCII)):
            raise LaunchUsageError(f"{option} {text}: {spec!r} is not of the form HOST or HOST:0,2")
        slots = chosen.setdefault(host, [])
        slots += [slot_number(number, f"{option} {text}") for number in numbers.split(",")] if colon else []
    return {host: sorted(set(slots)) for host, slots in chosen.items()}


def select(pool: Mapping[str, int], include: str = "", exclude: str = "") -> Slots:
    """The slots of `pool` that --include names, or all but those that --exclude names.

    Raises:
        LaunchUsageError: Both are given, one names a host or slot that is not there, or nothing is left.
    """
    if include and exclude:
        raise LaunchUsageError("--include and --exclude exclude each other: give one of them")
    everything = {host: list(range(slots)) for host, slots in pool.items()}
    if not include and not exclude:
        return everything
    option, text = ("--include", include) if include else ("--exclude", exclude)
    named = parse_node_specs(text, option)
    for host, slots in named.items():
        if host not in everything:
            raise LaunchUsageError(f"{option} {text}: there is no host {host}; there is {', '.join(everything)}")
        for slot in slots:
            if slot not in everything[host]:
                raise LaunchUsageError(
                    f"{option} {text}: host {host} has no slot {slot}; its slots are 0 to {pool[host] - 1}"
                )
    # An entry without slots stands for the whole host.
    whole = {host: slots or everything[host] for host, slots in named.items()}
    if include:
        left = {host: whole[host] for host in everything if host in whole}
    else:
        left = {
            host: [slot for slot in slots if slot not in whole.get(host, ())] for host, slots in everything.items()
        }
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise LaunchUsageError(f"{option} {text} leaves no slot to run on")
    return left


def trim(slots: Slots, num_nodes: int | None, num_gpus: int | None) -> Slots:
    """The first `num_nodes` hosts with their first `num_gpus` slots each; None takes all.

    Raises:
        LaunchUsageError: There are not so many.
    """
    for option, value in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if value is not None and value < 1:
            raise LaunchUsageError(f"{option} {value}: give 1 or more")
    if num_nodes is not None:
        if num_nodes > len(slots):
            raise LaunchUsageError(f"--num_nodes {num_nodes}, but the hosts are {', '.join(slots)}")
        slots = dict(list(slots.items())[:num_nodes])
    if num_gpus is None:
        return slots
    for host, own in slots.items():
        if num_gpus > len(own):
            raise LaunchUsageError(f"--num_gpus {num_gpus}, but host {host} has {len(own)}")
    return {host: own[:num_gpus] for host, own in slots.items()}
