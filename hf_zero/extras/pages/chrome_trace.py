"""Recorded spans as a trace for chrome://tracing and ui.perfetto.dev: a process for each rank, a row for each lane.

Format: "Trace Event Format" of the Chromium project; times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def chrome_trace(ranks: Sequence[Mapping[str, Any]], lanes: Sequence[str]) -> dict[str, Any]:
    """Of what each rank has recorded (engine/step_trace.py). Ranks of several hosts are as late as their clocks."""
    zero = min(one["began_at"] for one in ranks)
    events = [event for one in ranks for event in _events(one, lanes, (one["began_at"] - zero) * 1e6)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(one: Mapping[str, Any], lanes: Sequence[str], late_us: float) -> Iterator[dict[str, Any]]:
    rank = one["rank"]
    used = {span["lane"] for span in one["spans"]}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    rows = _rows(one["spans"])
    for number, (lane, row) in enumerate(sorted(set(rows), key=lambda key: (lanes.index(key[0]), key[1]))):
        assert lane in used
        name = lane if row == 0 else f"{lane} ({row + 1})"
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}
        for span, key in zip(one["spans"], rows, strict=True):
            if key == (lane, row):
                yield {
                    "ph": "X",
                    "name": span["name"],
                    "cat": lane,
                    "pid": rank,
                    "tid": number,
                    "ts": round(span["start_ms"] * 1000 + late_us, 3),
                    "dur": round(span["ms"] * 1000, 3),
                    "args": {"bytes": span["nbytes"], "collective": span["op"]} if span["nbytes"] else {},
                }
    for step in one["steps"]:
        times = {"ts": round(step["start_ms"] * 1000 + late_us, 3)}
        yield {"ph": "i", "s": "p", "name": f"step {step['step']}", "pid": rank, "tid": 0, **times}
    for sample in one["samples"]:
        kinds = {name: sample[name] for name in ("gathered", "gradients", "allocated")}
        yield {
            "ph": "C",
            "name": "memory (bytes)",
            "pid": rank,
            "ts": round(sample["at_ms"] * 1000 + late_us, 3),
            "args": kinds,
        }


def _rows(spans: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Lane and row of each span: those of a lane that overlap stand in rows under each other."""
    ends: dict[str, list[float]] = {}
    rows = []
    for span in spans:  # in the order of their starts
        free = ends.setdefault(span["lane"], [])
        row = next((at for at, end in enumerate(free) if end <= span["start_ms"]), len(free))
        free[row : row + 1] = [span["start_ms"] + span["ms"]]
        rows.append((span["lane"], row))
    return rows
