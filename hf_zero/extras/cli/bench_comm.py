"""`hf-zero bench comm`: how fast ranks get bytes from each other, in the words that `hf-zero estimate` takes.

Operations as a training makes them, over the same connections: all-gathers and reduce-scatters among the ranks of each
host, then all-gathers among the ranks at the same place on every host, where each host sends as much at once as in a
training. Ranks on CPUs make 8-bit messages besides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_zero.checkpoint.consolidate import parse_bytes
from hf_zero.extras.cli.text import format_bytes, print_table

if TYPE_CHECKING:
    from hf_zero.distributed.comm import Comm

SUMMARY = "what ranks get from each other, on one host or several; start it with torchrun, one process for each rank"
_SMALL = 4096
_ROUNDS = 32
_COLD = 128 << 20  # bytes: a training finds little of what it gathers in the processor's cache


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=parse_bytes, help="of the gathered tensor (default 4MiB over gloo, else 64MiB)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    from hf_zero.distributed.comm import Comm
    from hf_zero.distributed.processes import all_ranks_give
    from hf_zero.distributed.rank_groups import RankGroups, host_name, ranks_per_host

    comm = Comm.join()
    if comm.world_size < 2:
        raise argparse.ArgumentError(
            None,
            "this is one process alone: start one for each rank, torchrun --nproc_per_node 2 --no-python hf-zero ...",
        )
    size = ranks_per_host(all_ranks_give(host_name(), "measuring"))
    if size is None:
        raise argparse.ArgumentError(None, "start the same number of ranks on every host, numbered host by host")
    # Over gloo a training gathers buckets of this size; devices gather whole layers at once.
    nbytes = args.size or (4 << 20 if comm.backend == "gloo" else 64 << 20)
    groups = [RankGroups.of(rank, comm.world_size, size) for rank in range(comm.world_size)]
    found: dict[str, Any] = {"ranks": comm.world_size, "hosts": comm.world_size // size, "backend": comm.backend}
    found["latency_us"] = _seconds(comm, _SMALL) * 1e6
    if size > 1:
        inside = Comm.join(groups=sorted({group.inside for group in groups}))
        found["link"] = nbytes * (size - 1) / size / _seconds(inside, nbytes, sums=True)
    if size < comm.world_size:
        across = Comm.join(groups=sorted({group.across for group in groups}))
        hosts = comm.world_size // size
        found["network"] = size * nbytes * (hosts - 1) / hosts / _seconds(across, nbytes)
        if comm.computes_on_host:
            found["decode"] = _bytes_of_messages(comm, hosts)
    if comm.rank == 0:
        print(json.dumps(found)) if args.json else _print(found)
    comm.barrier("measured")  # the process that holds the store ends last


def _seconds(comm: Comm, nbytes: int, *, sums: bool = False) -> float:
    """Return the time of an operation on `nbytes` in total. All ranks of the world must call.

    Args:
        sums: A round is two all-gathers and a reduce-scatter, as of a layer at stage 3; else it is one all-gather.
    """
    import torch

    numel = -(-nbytes // (32 * comm.world_size)) * 8
    rows = torch.ones(max(1, min(_ROUNDS, _COLD // nbytes)), numel * comm.world_size, device=comm.device)

    def operations(number: int) -> None:
        full = rows[number % len(rows)]
        part = full.chunk(comm.world_size)[comm.rank]
        for _ in range(1 + sums):
            comm.all_gather(full, part, "measuring").wait()
        if sums:
            comm.reduce_scatter(part, full, "measuring").wait()
        full[:1].cpu()  # a device waits for it, and the host for the device

    return _time(comm, operations, _ROUNDS) / (3 if sums else 1)


def _bytes_of_messages(comm: Comm, number: int) -> float:
    """Return how many bytes of values a rank makes 8-bit messages of, and adds up from so many, in a second.

    All ranks of the world must call.
    """
    import torch

    from hf_zero.distributed.block_quantization import quantize, sum_messages

    # With so many values the allocator keeps the memory that is freed, as in a training.
    rows = torch.ones(number, _COLD // 16 // number)
    out = torch.empty(rows.shape[1])
    seconds = _time(comm, lambda _: sum_messages(out, quantize(rows)), _ROUNDS // 2)
    return rows.nbytes / seconds


def _time(comm: Comm, work: Callable[[int], None], rounds: int) -> float:
    """Return the seconds of a round, from its common start to the end of the last rank.

    It is the mean of the middle half of the rounds. Ranks that share a core wait for it in some of them, so that a
    median jumps; and a link that has just begun, or lost something, makes few of them very long.
    """
    work(0)  # connections, and memory that the system has not given yet
    times = []
    for number in range(rounds):
        comm.barrier("measuring")
        begun = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - begun)
    return statistics.mean(sorted(comm.largest(times, "measuring"))[rounds // 4 : -rounds // 4])


def _print(found: dict[str, Any]) -> None:
    rows = [("ranks, hosts, backend", f"{found['ranks']}, {found['hosts']}, {found['backend']}")]
    options = []
    for name, what in (
        ("link", "a rank gets, from its host"),
        ("network", "a host gets, from the others"),
        ("decode", "values a rank makes of 8-bit messages"),
    ):
        if name in found:
            rows.append((f"{what}, per second", format_bytes(found[name])))
            options.append(f"--{name} {format_bytes(found[name]).replace(' ', '')}/s")
    rows.append(("an operation of 4 kB takes", f"{found['latency_us']:.0f} us"))
    print_table(rows)
    print(f"hf-zero estimate MODEL ... {' '.join(options)} --latency {found['latency_us']:.0f}")
