"""Python that a layer costs in each pass, as bytecodes: a count, which no other process on the machine changes.

    python scripts/count_bytecodes.py                       # 2 gloo ranks
    python scripts/count_bytecodes.py --functions zero3-p0  # and by function, for one variant

Variants are those of bench_step.py. Counted is what the calling thread of rank 0 runs in its fourth step, backward
hooks included (on the CPU they run there), and how that grows from 4 layers to 8, over what plain torch runs.
"""

from __future__ import annotations

import argparse
import collections
import sys
from types import FrameType
from typing import Any

import bench_step
import benchlib
import torch.distributed as dist

_DEPTHS = (4, 8)
_COUNTED = 3  # the step: the first ones trace, learn the order of layers and allocate
_VARIANTS = ("plain", "fsdp2", "zero2", "zero3", "zero3-p0")

Counts = dict[str, int]  # by function


def counted(call: Any, *args: Any) -> tuple[Any, Counts]:
    """Return the result of `call`, and the bytecodes that it took by function."""
    found: collections.Counter[str] = collections.Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            code = frame.f_code
            found[f"{'/'.join(code.co_filename.split('/')[-3:])}:{code.co_name}"] += 1
        return trace

    sys.settrace(trace)
    try:
        result = call(*args)
    finally:
        sys.settrace(None)
    return result, dict(found)


def passes_of(name: str, layers: int, args: argparse.Namespace) -> list[Counts]:
    """The bytecodes of a step by pass; all ranks must call."""
    size = benchlib.ModelSize(hidden=32, intermediate=48, layers=layers, heads=4, vocab=64)
    variant = bench_step.make_variant(name, size, args)
    found: list[Counts] = []
    for step in range(_COUNTED + 1):
        batch = benchlib.make_batch(size.vocab, (args.micro_batch, args.seq), dist.get_rank(), step)
        if step < _COUNTED:
            variant.backward(variant.forward(batch))
            variant.update()
            continue
        loss, forward = counted(variant.forward, batch)
        _, backward = counted(variant.backward, loss)
        _, update = counted(variant.update)
        found = [forward, backward, update]
    return found


def per_layer(name: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """The bytecodes that a further layer costs, by pass and function."""
    few, many = (passes_of(name, layers, args) for layers in _DEPTHS)
    more = _DEPTHS[1] - _DEPTHS[0]
    return [
        {one: (after[one] - before.get(one, 0)) / more for one in after}
        for before, after in zip(few, many, strict=True)
    ]


def report(result: dict[str, list[dict[str, float]]], functions: str | None) -> str:
    totals = {name: [sum(one.values()) for one in passes] for name, passes in result.items()}
    rows = [
        [name, *(f"{mine - plain:+.0f}" for mine, plain in zip(passes, totals["plain"], strict=True))]
        for name, passes in totals.items()
        if name != "plain"
    ]
    lines = [f"plain: {', '.join(f'{one:.0f}' for one in totals['plain'])} bytecodes per layer; beyond it:", ""]
    lines.append(benchlib.table(["variant", *benchlib.PASSES], rows))
    for title, found in zip(benchlib.PASSES, result.get(functions or "", []), strict=False):
        lines += ["", f"{functions}, {title}:"]
        most = sorted(found.items(), key=lambda one: -one[1])[:25]
        lines += [f"{number:8.0f} {function}" for function, number in most if number > 0]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="gloo ranks (default 2)")
    parser.add_argument("--functions", choices=_VARIANTS, help="also list this variant's functions")
    benchlib.common_arguments(parser)
    mine = parser.parse_args()
    args = bench_step.parse(["--seq", "8"])
    if benchlib.in_rank():
        benchlib.run_rank(lambda: {name: per_layer(name, args) for name in _VARIANTS})
        return
    result = benchlib.launch(sys.argv, mine.world, timeout_s=mine.timeout, threads=mine.threads)
    benchlib.tell(mine, result, report(result, mine.functions))


if __name__ == "__main__":
    main()
