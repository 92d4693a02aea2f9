"""`hf-zero bench cpu-adam` times the compiled Adam update, beside torch's and beside plain passes over memory.

All variants run in turn on the same tensors; the order is reversed from round to round. A ratio is the median over
rounds of the ratio within a round, which the other load of a machine hardly moves. The plain passes are torch's own
in-place product and sum: they move the 28 bytes per element of an fp32 Adam, which are also those of bf16 gradients in
and bf16 parameters out in one pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_zero.errors import StateError
from hf_zero.extras.cli.text import count, format_bytes, plural, table
from hf_zero.native.machine import available_bytes, default_threads

SUMMARY = "the Adam update on the CPU: torch's, and what memory allows"

MEMORY = "passes over the same bytes"
BYTES_PER_ELEMENT = 28  # fp32: parameter, two moments read and written, gradient read
_BYTES_OF_TENSORS = 4 * 4 + 2 * 2 + 2 * 2  # state and gradient in fp32; gradient, parameter and moments in bf16
_MIN_CALL_ELEMENTS = 1_000_000  # small sizes are repeated within one timing

Series = Mapping[str, Sequence[float]]  # seconds per variant, one number a round


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--numel",
        type=count,
        nargs="+",
        default=[10_000_000],
        metavar="N",
        help="elements, e.g. 1e7 1e8 (default 1e7)",
    )
    parser.add_argument(
        "--threads",
        type=count,
        nargs="+",
        metavar="T",
        help="threads (default: 1, and this process's share of the cores)",
    )
    parser.add_argument("--rounds", type=count, default=9, metavar="R", help="timings per variant (default 9)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    _check_memory(max(args.numel))
    threads = args.threads or sorted({1, default_threads()})
    results = []
    for numel in args.numel:
        for number in threads:
            results.append(summarize(measure(variants(numel, number), numel, args.rounds), numel, number))
            if not args.json:
                print_result(results[-1])
    if args.json:
        print(json.dumps(results))


def _check_memory(numel: int) -> None:
    needed = numel * _BYTES_OF_TENSORS
    free = available_bytes()
    if needed > free:
        raise StateError(
            f"{numel:,} elements need {format_bytes(needed)} of memory, and {format_bytes(free)} are free: "
            f"give --numel {free // _BYTES_OF_TENSORS // 2:.0e} or less"
        )


class Tensors:
    """The tensors that all variants work on: one parameter with its state, in fp32, and its bf16 gradient and copy."""

    def __init__(self, numel: int) -> None:
        import torch

        self.parameter = torch.nn.Parameter(torch.randn(numel))
        self.parameter.grad = torch.randn(numel)
        self.master, self.grad = self.parameter.detach(), self.parameter.grad
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.full((numel,), 1e-2)
        self.parameter16, self.grad16 = self.master.bfloat16(), self.grad.bfloat16()

    def with_casts(self, step: Callable[[], Any]) -> Callable[[], None]:
        """`step` on fp32 tensors, with the two passes around it that bf16 training needs then."""

        def run() -> None:
            self.grad.copy_(self.grad16)
            step()
            self.parameter16.copy_(self.master)

        return run


def variants(numel: int, threads: int, tensors: Tensors | None = None) -> dict[str, Callable[[], Any]]:
    """Name -> one update. Sets torch's number of threads."""
    import torch

    from hf_zero.native.adam import AdamSpan, adam_step

    torch.set_num_threads(threads)
    t = tensors or Tensors(numel)
    state = (t.master, t.exp_avg, t.exp_avg_sq)
    spans = [AdamSpan(0, numel, 0, 0, 0, 100, 1e-6, 0.9, 0.999, 1e-8, 0.01, True)]
    fused = torch.optim.AdamW([t.parameter], lr=1e-6, weight_decay=0.01, fused=True)
    fused.state[t.parameter] = {"step": torch.tensor(100.0), "exp_avg": t.exp_avg, "exp_avg_sq": t.exp_avg_sq}
    moments16 = (t.exp_avg.bfloat16(), t.exp_avg_sq.bfloat16())

    def passes() -> None:
        for tensor in state:
            tensor.mul_(1.0)
        t.grad.sum()

    return {
        "hf_zero": lambda: adam_step(spans, *state, t.grad, threads=threads),
        "hf_zero, bf16 in and out": lambda: adam_step(spans, *state, t.grad16, out=t.parameter16, threads=threads),
        "hf_zero, also bf16 moments": lambda: adam_step(
            spans, t.master, *moments16, t.grad16, out=t.parameter16, threads=threads
        ),
        "torch fused": fused.step,
        "torch fused + casts": t.with_casts(fused.step),
        MEMORY: passes,
    }


def measure(runs: Mapping[str, Callable[[], Any]], numel: int, rounds: int) -> dict[str, list[float]]:
    """Time each variant, in seconds per update; the first round warms up and is dropped."""
    repeats = max(1, _MIN_CALL_ELEMENTS // numel)
    series: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            for _ in range(repeats):
                runs[name]()
            if number:
                series[name].append((time.perf_counter() - start) / repeats)
    return series


def ratio(series: Series, base: str, name: str) -> float:
    """Return how many times faster `name` is than `base`."""
    return statistics.median(a / b for a, b in zip(series[base], series[name], strict=True))


def summarize(series: Series, numel: int, threads: int) -> dict[str, Any]:
    return {
        "numel": numel,
        "threads": threads,
        "variants": {
            name: {
                "ms": 1e3 * statistics.median(values),
                "ms_min": 1e3 * min(values),
                "times_memory": ratio(series, MEMORY, name),
                "gelem_s": numel / statistics.median(values) / 1e9,
            }
            for name, values in series.items()
        },
    }


def print_result(result: Mapping[str, Any]) -> None:
    print(f"{plural(result['numel'], 'element')}, {plural(result['threads'], 'thread')}")
    rows = [
        (
            name,
            f"{row['ms']:.2f}",
            f"{row['ms_min']:.2f}",
            f"{row['gelem_s']:.2f}",
            f"{row['gelem_s'] * BYTES_PER_ELEMENT:.1f}" if name in (MEMORY, "hf_zero") else "",
            f"{row['times_memory']:.2f}",
        )
        for name, row in result["variants"].items()
    ]
    head = ("variant", "ms", "ms, best", "Gelem/s", "GB/s", "speed / passes")
    print("\n".join(table([head, *rows])))
    print(f"speed / passes: 1.00 is as fast as torch's plain {MEMORY} ({BYTES_PER_ELEMENT} per element)\n")
