"""The CPU Adam update beside DeepSpeedCPUAdam, torch's fused AdamW and plain passes over memory, in one run.

    python scripts/bench_cpu_adam.py                                  # 1e7 and 1e8 elements, 1 and 2 threads
    python scripts/bench_cpu_adam.py --numel 1e7 --threads 1 --json adam.json

Every size and number of threads is a process of its own (OMP_NUM_THREADS is read once). The variants run in turn on
the same tensors. "+ casts" is what bf16 training needs around an fp32 update: the gradient widened before it, the
parameter rounded after it. The plain passes, torch's in-place product and sum, read four fp32 streams and write three.

DeepSpeed is measured if it can be imported (extra [peers]: pip install torch first, then
DS_BUILD_OPS=0 pip install deepspeed --no-build-isolation, with ninja; it compiles its kernel at first use).

Exit status 1 if a gate does not hold: fp32, and bf16 in and out, as fast as the passes from 1e8 elements on and at
0.95 of their speed below; bf16 in and out at 1.7 times DeepSpeedCPUAdam + casts.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_zero.extras.cli import bench_cpu_adam as bench  # noqa: E402
from hf_zero.extras.cli.text import count  # noqa: E402

OURS = ("hf_zero", "hf_zero, bf16 in and out")
DEEPSPEED = "DeepSpeedCPUAdam"
DEEPSPEED_CASTS = "DeepSpeedCPUAdam + casts"
TIMES_DEEPSPEED = 1.7


def least_of_memory(numel: int) -> float:
    return 1.0 if numel >= 100_000_000 else 0.95


def deepspeed_variants(tensors: bench.Tensors) -> dict[str, Any]:
    if importlib.util.find_spec("deepspeed") is None:
        return {}
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    peer = DeepSpeedCPUAdam([tensors.parameter], lr=1e-6, weight_decay=0.01, adamw_mode=True)
    peer.state[tensors.parameter] = {"step": 100, "exp_avg": tensors.exp_avg, "exp_avg_sq": tensors.exp_avg_sq}
    return {DEEPSPEED: peer.step, DEEPSPEED_CASTS: tensors.with_casts(peer.step)}


def work(numel: int, threads: int, rounds: int) -> dict[str, Any]:
    tensors = bench.Tensors(numel)
    runs = bench.variants(numel, threads, tensors)
    runs.update(deepspeed_variants(tensors))
    series = bench.measure(runs, numel, rounds)
    result = bench.summarize(series, numel, threads)
    if DEEPSPEED_CASTS in series:
        result["times_deepspeed"] = bench.ratio(series, DEEPSPEED_CASTS, OURS[1])
    return {**result, "seconds": series}


def run_apart(numel: int, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        command = [sys.executable, __file__, "--numel", str(numel), "--threads", str(threads)]
        command += ["--rounds", str(args.rounds), "--worker", answer.name]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.timeout)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        result: dict[str, Any] = json.loads(Path(answer.name).read_text())
    return result


def failures(result: dict[str, Any]) -> Iterator[str]:
    where = f"{result['numel']:,} elements, {result['threads']} threads"
    for name in OURS:
        reached, least = result["variants"][name]["times_memory"], least_of_memory(result["numel"])
        if reached < least:
            yield f"{where}: {name} is at {reached:.3f} of the passes, expected {least}"
    times = result.get("times_deepspeed")
    if times is not None and times < TIMES_DEEPSPEED:
        yield f"{where}: {OURS[1]} is {times:.2f} times DeepSpeedCPUAdam + casts, expected {TIMES_DEEPSPEED}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=count, nargs="+", default=[10_000_000, 100_000_000], metavar="N")
    parser.add_argument("--threads", type=count, nargs="+", default=[1, 2], metavar="T")
    parser.add_argument("--rounds", type=count, default=15, help="timings per variant (default 15)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one size and number of threads")
    parser.add_argument("--json", metavar="FILE", help="write every measured value there")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.worker:
        Path(args.worker).write_text(json.dumps(work(args.numel[0], args.threads[0], args.rounds)))
        return 0
    print(f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}\n")
    results: list[Any] = []
    missed: list[str] = []
    for numel in args.numel:
        for threads in args.threads:
            results.append(run_apart(numel, threads, args))
            bench.print_result(results[-1])
            if "times_deepspeed" in results[-1]:
                print(f"bf16 in and out: {results[-1]['times_deepspeed']:.2f} times DeepSpeedCPUAdam + casts\n")
            missed += failures(results[-1])
    if args.json:
        Path(args.json).write_text(json.dumps(results))
    print("\n".join(missed) or "all gates hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
