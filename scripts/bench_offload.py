"""Step time with offloaded optimizer states and parameters beside the bounds that disk and compute set.

    python scripts/bench_offload.py /local_nvme             # 135 M parameters, 2 ranks: none, cpu, nvme ...
    python scripts/bench_offload.py /local_nvme --delayed   # delayed updates: 1 rank, few tokens, update near backward
    python scripts/bench_offload.py /local_nvme --memory    # anonymous memory of a rank, fresh processes

Variants train copies of one model on the same data in the same processes, some steps in turn; read the ratios. The
bounds come from the same run: "compute" is the step of the cpu variant, which reads and writes no file; disk time is
what the store of the nvme variant moved in a step, at the rates that fio (apt-get install fio) reaches on the folder
with the same block size, queue depth and O_DIRECT. The run fails if the losses of the exact variants differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from benchlib import ModelSize, Series

EXACT = 1e-5  # largest relative difference of a loss from the first variant's
FIO_BYTES = 1 << 30


class Zero(benchlib.ZeroLoop):
    """A variant of one size and configuration."""

    def __init__(self, size: ModelSize, args: argparse.Namespace, config: dict[str, Any]) -> None:
        model = size.build()
        if args.dtype == "bf16":
            model = model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, fused=True)
        super().__init__(model, optimizer, config)

    def finish(self) -> None:
        if not self.engine.config.zero.offload_optimizer.delayed_update:
            self.engine.finish_updates()


def zero_config(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The configuration of a variant: none, cpu, nvme, then any of -params, -clip, -delayed, -sequential."""
    device, *flavours = name.split("-")
    zero: dict[str, Any] = {"stage": args.stage}
    block: dict[str, Any] = {"device": device, "nvme_path": args.folder}
    if device != "none":
        zero["offload_optimizer"] = block
        if "params" in flavours:
            zero["offload_param"] = {**block, "max_in_cpu": 0}
    if "delayed" in flavours:
        block["delayed_update"] = True
    if "sequential" in flavours:
        block["pipeline_read"] = block["pipeline_write"] = False
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_clipping": 1.0 if "clip" in flavours else 0.0,
        "zero_optimization": zero,
        "aio": {"block_size": args.block_size, "queue_depth": args.queue_depth},
    }


# ---------------------------------------------------------------- in a rank
def measure(args: argparse.Namespace) -> dict[str, Any]:
    size = ModelSize.of(args)
    variants = {name: Zero(size, args, zero_config(name, args)) for name in args.variants}
    numel = sum(buffer.layout.numel for unit in variants[args.variants[0]].engine.units for buffer in unit.flats)

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(f"[bench_offload] {text}", file=sys.stderr, flush=True)

    def batch_of(name: str, step: int) -> dict[str, torch.Tensor]:
        return benchlib.make_batch(size.vocab, (args.micro_batch, args.seq), dist.get_rank(), step)

    benchlib.restart_peak()
    before = {name: _moved(made) for name, made in variants.items()}
    counts = {"rounds": args.rounds, "steps": args.steps, "warmup": args.warmup}
    series = benchlib.measure_in_turn(variants, batch_of, **counts, say=say)
    taken = args.rounds * args.steps + args.warmup
    moved = {}
    for name, made in variants.items():
        made.engine.finish_updates()
        mine = [(after - start) / taken for after, start in zip(_moved(made), before[name], strict=True)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        moved[name] = [sum(values) for values in zip(*everyone, strict=True)]
    anonymous = [None] * dist.get_world_size()
    dist.all_gather_object(anonymous, benchlib.anonymous_peak())
    return {
        "numel": numel,
        "series": {name: vars(one) for name, one in series.items()},
        "moved": moved,
        "report": {name: made.engine.memory_report() for name, made in variants.items()},
        "anonymous": anonymous,
    }


def _moved(variant: Zero) -> tuple[int, int]:
    """Bytes read from and written to disk by this rank."""
    stats = variant.engine.placements.stats().values()
    return sum(one.bytes_read for one in stats), sum(one.bytes_written for one in stats)


# ---------------------------------------------------------------- in the launcher
def fio_rates(args: argparse.Namespace) -> dict[str, float]:
    """The bytes per second of sequential reads and writes, the median of three runs."""
    path = Path(args.folder) / "bench_offload.fio"
    rates: dict[str, list[float]] = {"write": [], "read": []}
    try:
        for _ in range(3):
            for direction, found in rates.items():
                command = ["fio", "--name=x", f"--filename={path}", "--ioengine=libaio", f"--rw={direction}"]
                command += [f"--bs={args.block_size}", f"--iodepth={args.queue_depth}", f"--size={FIO_BYTES}"]
                command += ["--direct=1", "--output-format=json"]
                text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                found.append(json.loads(text[text.index("{") :])["jobs"][0][direction]["bw_bytes"])
    finally:
        path.unlink(missing_ok=True)
    return {direction: statistics.median(found) for direction, found in rates.items()}


def report(args: argparse.Namespace, result: dict[str, Any], fio: dict[str, float] | None) -> tuple[str, bool]:
    """The text to print, and whether the losses agree."""
    series = {name: Series(**values) for name, values in result["series"].items()}
    first = args.variants[0]
    about = benchlib.environment()
    lines = [
        ", ".join(f"{key} {value}" for key, value in about.items()),
        f"model: Llama {vars(ModelSize.of(args))}, {result['numel'] / 1e6:.1f} M parameters, {args.dtype}",
        f"stage {args.stage}, {args.world} gloo rank(s), {args.threads} compute thread(s) each, micro-batch "
        f"{args.micro_batch} x {args.seq} tokens, {args.rounds} rounds x {args.steps} steps per variant",
    ]
    if fio:
        lines.append(
            f"fio on {args.folder}, {args.block_size} x {args.queue_depth}, O_DIRECT: read {fio['read'] / 1e9:.2f}, "
            f"write {fio['write'] / 1e9:.2f} GB/s"
        )
    head = ["variant", "step ms", f"x {first}", "x cpu", "read MB", "written MB", "disk ms at fio", "of bound"]
    rows = [_row(name, one, series, result["moved"][name], fio, first) for name, one in series.items()]
    lines += ["", benchlib.table(head, rows), ""]
    lines += [
        "step ms: mean over the steps of a round, median over rounds. Bytes: per step, all ranks. of bound: step over",
        "max(step of cpu, disk time) without clipping, over their sum with it.",
        f"Other processes kept {benchlib.cores_of_others(series.values()):.1f} cores busy during the run.",
    ]
    return "\n".join(lines), _losses_agree(series, lines)


def _row(
    name: str, one: Series, series: dict[str, Series], moved: list[float], fio: dict[str, float] | None, first: str
) -> list[str]:
    mine = one.mean_round_s()
    row = [name, f"{statistics.median(mine) * 1e3:.0f}", f"{benchlib.paired(mine, series[first].mean_round_s()):.3f}"]
    row.append(f"{benchlib.paired(mine, series['cpu'].mean_round_s()):.3f}" if "cpu" in series else "")
    row += [f"{value / 1e6:.0f}" for value in moved]
    if fio is None or not any(moved) or "cpu" not in series:
        return [*row, "", ""]
    disk = moved[0] / fio["read"] + moved[1] / fio["write"]
    compute = series["cpu"].mean_round_s()
    bound = [value + disk if "clip" in name or "sequential" in name else max(value, disk) for value in compute]
    return [*row, f"{disk * 1e3:.0f}", f"{benchlib.paired(mine, bound):.3f}"]


def _losses_agree(series: dict[str, Series], lines: list[str]) -> bool:
    """Whether variants that do not clip or delay train alike."""
    exact = {name: one for name, one in series.items() if not {"clip", "delayed"} & set(name.split("-"))}
    if not exact:
        return True
    want = next(iter(exact.values())).losses
    worst = max(
        abs(mine - theirs) / abs(theirs)
        for one in exact.values()
        for mine, theirs in zip(one.losses, want, strict=True)
    )
    lines.append(f"losses of {', '.join(exact)}: largest relative difference {worst:.2g}")
    return worst <= EXACT


def memory(args: argparse.Namespace) -> str:
    """Every variant in fresh processes."""
    rows = []
    variants = args.variants
    for name in variants:
        argv = [*sys.argv, "--variants", name, "--rounds", "1"]
        result = benchlib.launch(argv, args.world, timeout_s=args.timeout, threads=args.threads)
        kept = result["report"][name]
        row = [name, *(f"{kept[kind] / 1e6:.0f}" for kind in ("parameters", "gradients", "master", "optimizer"))]
        rows.append([*row, f"{kept['disk'] / 1e6:.0f}", f"{max(result['anonymous']) / 1e6:.0f}"])
    head = ["variant", "parameters", "gradients", "master", "optimizer", "of it on disk", "anonymous peak"]
    return f"MB per rank, {result['numel'] / 1e6:.1f} M parameters, {args.world} rank(s)\n\n" + benchlib.table(
        head, rows
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", help="where nvme variants keep their files")
    add("--variants", help="comma-separated: none, cpu or nvme with any of -params, -clip, -delayed, -sequential")
    add("--delayed", action="store_true", help="delayed updates beside updates at once, on one rank")
    add("--memory", action="store_true", help="memory of a rank instead of times")
    add("--stage", type=int, default=3)
    add("--world", type=int, help="ranks (default 2; 1 with --delayed)")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=4, help="steps of a variant per round")
    add("--warmup", type=int, default=2)
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--lr", type=float, default=1e-4)
    add("--micro-batch", type=int, help="default 2; 1 with --delayed")
    add("--seq", type=int, help="tokens of a sequence (default 128; 24 with --delayed)")
    add("--block-size", type=int, default=1 << 20)
    add("--queue-depth", type=int, default=8)
    benchlib.size_arguments(parser, ModelSize(768, 2048, 12, 12, 32768))
    benchlib.common_arguments(parser)
    args = parser.parse_args(argv)
    args.world = args.world or (1 if args.delayed else 2)
    args.micro_batch = args.micro_batch or (1 if args.delayed else 2)
    args.seq = args.seq or (24 if args.delayed else 128)
    default = "none,cpu,cpu-delayed,nvme,nvme-delayed" if args.delayed else "none,cpu,nvme,nvme-clip,nvme-sequential"
    args.variants = (args.variants or default).split(",")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if benchlib.in_rank():
        benchlib.run_rank(lambda: measure(args))
        return
    if args.memory:
        print(memory(args))
        return
    fio = fio_rates(args) if any(name.startswith("nvme") for name in args.variants) else None
    result = benchlib.launch(sys.argv, args.world, timeout_s=args.timeout, threads=args.threads)
    text, agree = report(args, result, fio)
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": vars(args), "fio": fio, **result}, indent=1) + "\n")
    print(text)
    if not agree:
        sys.exit("the variants do not train alike")


if __name__ == "__main__":
    main()
