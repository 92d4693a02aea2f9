"""The `comms_logger` block: tables of what a CommsLog has logged, as `deepspeed.comm.log_summary` shows them."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hf_zero.config import COLLECTIVES
from hf_zero.engine.engine import ZeroEngine
from hf_zero.engine.parts import EnginePart
from hf_zero.engine.reports import Watcher
from hf_zero.extras.monitors.comms_log import CommsLog
from hf_zero.logs import log_line

_TRIM = 0.1  # of the times at either end, which a mean leaves out
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_HEAD = (
    "Comm. Op",
    "Message Size",
    "Count",
    "Total Latency(ms)",
    "Avg Latency(ms)",
    "tput_avg (Gbps)",
    "busbw_avg (Gbps)",
)
_STRAGGLER_HEAD = (
    *_HEAD[:3],
    "Total comm lat(ms)",
    "Total straggler(ms)",
    "Avg comm lat(ms)",
    "Avg straggler(ms)",
)
_COLUMN = 20

Rows = dict[str, dict[int, dict[str, Any]]]  # operation -> bytes -> figures, under DeepSpeed's names


class CommsPart(EnginePart):
    """Logs the collectives of its engine from the end of the construction on; `log` is None where nothing is asked."""

    engine: ZeroEngine
    log: CommsLog | None = None

    def start(self) -> Sequence[Watcher]:
        section, comm = self.engine.config.comms_logger, self.engine.comm
        if section.enabled:
            wanted = COLLECTIVES if section.prof_all else tuple(section.prof_ops)
            show = self._show if section.verbose and comm.rank == 0 else None
            self.log = CommsLog(comm, wanted, names_tensors=section.debug, show=show)
        return ()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def _show(self, name: str, nbytes: int, ms: float) -> None:
        through, bus = bandwidths(name, nbytes, ms, self.engine.comm.world_size)
        log_line(
            f"comm op: {name} | time (ms): {ms:.2f} | msg size: {size_text(nbytes)} | algbw (Gbps): {through:.2f} | "
            f"busbw (Gbps): {bus:.2f}"
        )


def log_of(engine: ZeroEngine) -> CommsLog | None:
    """Return the log of an engine's collectives, if it has one."""
    return next((part.log for part in engine.parts if isinstance(part, CommsPart)), None)


def bandwidths(name: str, nbytes: int, ms: float, world_size: int) -> tuple[float, float]:
    """Gbit/s of a collective with a whole tensor of `nbytes`: the algorithm's, and the bus's, by which connections of
    any number of ranks compare. Source: NVIDIA's nccl-tests, PERFORMANCE.md."""
    if ms <= 0.0:
        return 0.0, 0.0
    through = nbytes * 8 / 1e6 / ms
    operation = name.split(" | ")[0]
    share = (world_size - 1) / world_size
    return through, through * {"broadcast": 1.0, "all_reduce": 2 * share}.get(operation, share)


def size_text(nbytes: int) -> str:
    """ "1.5 MB": by powers of 1024, two digits behind the point."""
    if nbytes == 0:
        return "0B"
    power = min(int(math.log(nbytes, 1024)), len(_UNITS) - 1)
    return f"{round(nbytes / 1024**power, 2)} {_UNITS[power]}"


def rows_of(log: CommsLog) -> Rows:
    """Return the figures of each operation and size. Means are of the last calls."""
    found: Rows = {}
    for name, by_size in log.calls().items():
        for nbytes, calls in sorted(by_size.items()):
            mean = _mean(calls.last_ms)
            through, bus = bandwidths(name, nbytes, mean, log.world_size)
            found.setdefault(name, {})[nbytes] = {
                "count": calls.count,
                "total_latency_ms": calls.total_ms,
                "avg_latency_ms": mean,
                "tput_avg_gbps": through,
                "busbw_avg_gbps": bus,
                "msg_size_bytes": nbytes,
                "msg_size_str": size_text(nbytes),
            }
    return found


def stragglers_of(log: CommsLog) -> Rows:
    """Return how long this rank waited in the last calls: its time less the shortest of all. All ranks must call."""
    fastest, found = log.fastest_ms(), Rows()
    for name, by_size in log.calls().items():
        for nbytes, calls in sorted(by_size.items()):
            least = fastest[name][nbytes]
            waited = [mine - other for mine, other in zip(calls.last_ms, least, strict=False)]
            found.setdefault(name, {})[nbytes] = {
                "count": len(least),
                "total_comm_lat_ms": sum(least),
                "total_straggler_ms": sum(waited),
                "avg_comm_lat_ms": _mean(least),
                "avg_straggler_ms": _mean(waited),
                "msg_size_bytes": nbytes,
                "msg_size_str": size_text(nbytes),
            }
    return found


def lines_of(rows: Rows, head: Sequence[str]) -> Iterator[str]:
    """A table in DeepSpeed's layout. `head` and the figures of a row stand in the same order."""
    yield "".join(name.ljust(_COLUMN) for name in head)
    for name, by_size in rows.items():
        yield name
        for figures in by_size.values():
            *values, _, size = figures.values()
            texts = [str(value) if isinstance(value, int) else f"{value:.2f}" for value in values]
            yield "".join(text.ljust(_COLUMN) for text in ("", size, *texts))


def show_summary(logs: Mapping[str, CommsLog], rank: int, *, show_straggler: bool = False) -> dict[str, Any]:
    """Print the tables on rank 0; return the figures of this rank, in the shape that DeepSpeed's `return_dict` has.

    Args:
        logs: By a name that sets the operations of each apart: "" where there is one only.
        show_straggler: Then all ranks must call.
    """
    rows: Rows = {}
    stragglers: Rows = {}
    for name, log in logs.items():
        rows.update({f"{name}{operation}": sizes for operation, sizes in rows_of(log).items()})
        if show_straggler:
            stragglers.update({f"{name}{operation}": sizes for operation, sizes in stragglers_of(log).items()})
    if rank == 0:
        log_line("\n".join(["collectives of rank 0", *lines_of(rows, _HEAD)]))
        if show_straggler:
            log_line("\n".join(["breakdown with straggler effect", *lines_of(stragglers, _STRAGGLER_HEAD)]))
    return {
        "summary": rows,
        "straggler_analysis": stragglers if show_straggler else None,
        "metadata": {
            "world_size": max(log.world_size for log in logs.values()),
            "rank": rank,
            "timestamp": datetime.datetime.now().isoformat(),
        },
    }


def _mean(values: Iterable[float]) -> float:
    """Return the mean without the largest and the smallest tenth."""
    ordered = sorted(values)
    cut = round(len(ordered) * _TRIM)
    return statistics.fmean(ordered[cut : len(ordered) - cut] or [0.0])
