"""Collectives of ranks that compute on the CPU which are faster than gloo's own (scripts/bench_comm.py measures them).

See EngineGroup.exchange for the messages that they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_zero.distributed.buffer_pool import BufferPool
from hf_zero.distributed.engine_group import EngineGroup
from hf_zero.distributed.peer_memory import Gather, PeerMemory
from hf_zero.distributed.work import Pending

# Elements per collective on gloo: larger single calls fall out of the cache.
GLOO_BUCKET_NUMEL = 1 << 20


def exchange_and_sum(
    group: EngineGroup, pool: BufferPool, out: torch.Tensor, sent: torch.Tensor, what: str
) -> Pending:
    """Reduce-scatter by all-to-all and a local sum in rank order.

    gloo's own reduce-scatter takes two to four times as long and rounds in the type that travels at every hop.
    """
    received = pool.take(sent.numel(), sent.dtype)

    def finish() -> None:
        parts = received.view(group.world_size, -1)
        if group.world_size == 2 and received.dtype == out.dtype:
            torch.add(parts[0], parts[1], out=out)
        else:
            torch.sum(parts, 0, dtype=out.dtype, out=out)
        pool.give(received)

    return group.exchange(received.chunk(group.world_size), sent.chunk(group.world_size), what, finish)


def read_parts(group: EngineGroup, peers: PeerMemory, gathers: Sequence[Gather], what: str) -> None:
    """All-gathers by reading the parts of the other ranks from their memory. All ranks must call."""
    mine = torch.tensor([part.data_ptr() for _, part in gathers])
    addresses = torch.empty((group.world_size, len(gathers)), dtype=mine.dtype)
    # Over when every rank's parts are there to be read
    group.exchange(addresses.unbind(), [mine] * group.world_size, what).wait()
    try:
        peers.fill(gathers, addresses.tolist(), group.rank)
    except OSError as error:
        raise group.failure(what, error) from error
    # Parts may change once every rank has read them.
    group.begin(dist.barrier, what).wait()
