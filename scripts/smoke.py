"""Shows what hf_zero does on GPUs, as a table: scripts/smoke.sh sets up and starts this.

    python scripts/smoke.py                  # one GPU, 4 minutes; exit status 1 if anything is not as it should be
    python scripts/smoke.py --ranks 0        # all GPUs of the host, over their own backend, 10 minutes
    python scripts/smoke.py --ranks 2 --one-device   # the same checks on one GPU: NCCL takes its ranks for two hosts
    python scripts/smoke.py --results        # add the table to RESULTS.md
    python scripts/smoke.py --only parity,memory
    python scripts/smoke.py --device lag --size tiny   # a rehearsal without hardware, on the device of tests/lag

On one GPU, each in a process of its own: parity (every stage and medium, with the losses of the CPU, and where the
host waits for the device), lifetimes (resume with fused AdamW, teardown, a second engine), memory (peaks beside the
plans of hf-zero estimate), speed (tokens per second of offload), theirs (DeepSpeed's). On several ranks: parity (under
torchrun: every stage and medium with the losses of one process, and the waits and collectives of a step), failures (a
rank is killed, or runs another program: all end with a sentence, within seconds), resume (a checkpoint at another
number of ranks), speed (tokens per second beside DDP and FSDP2). Where there are fewer GPUs the exit status is 2, with
--skip-without-gpu 0.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from benchlib import ModelSize
from smoke_checks import (
    failed_rank,
    lifetimes,
    memory,
    other_world,
    over_ranks,
    parity,
    peers,
    place,
    ranks,
    rows,
    speed,
    waits,
)
from smoke_checks.rows import FAILED, NOT_SEEN, Row
from smoke_checks.settings import Shape
from smoke_checks.training import Task

import hf_zero

SIZES = {
    # For numbers, for what is measured.
    "full": (ModelSize(256, 704, 4, 4, 2048), ModelSize(1024, 2816, 12, 16, 32768)),
    "tiny": (ModelSize(8, 16, 2, 2, 17), ModelSize(16, 32, 2, 2, 32)),
}
MEASURED_SHAPES = {"full": Shape(4, 512, steps=5), "tiny": Shape(tokens=8, steps=2)}
# Checks and the seconds that they may take.
ON_ONE = {"parity": 150, "lifetimes": 90, "memory": 60, "speed": 60, "theirs": 240}
ON_SEVERAL = {"parity": 240, "failures": 150, "resume": 90, "speed": 240}


def rows_on_one(check: str, args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Check one device, in a process of its own."""
    for_numbers, for_measures = SIZES[args.size]
    numbers = Task(for_numbers, Shape(tokens=8 if args.size == "tiny" else 32), args.folder, brief=args.brief)
    measures = Task(for_measures, MEASURED_SHAPES[args.size], args.folder, brief=args.brief)
    if check == "parity":
        yield from parity.check(numbers, args.device)
        yield from parity.unseen(waits.can_count(device))
    elif check == "lifetimes":
        yield from lifetimes.check(numbers, args.device)
    elif check == "memory":
        yield from memory.check(measures, args.device)
    elif check == "speed":
        yield from speed.check(measures, args.device)
    else:
        yield from speed.check_theirs(measures, args.device)


def rows_on_several(check: str, args: argparse.Namespace) -> Iterator[Row]:
    """Check several devices, on each of the ranks; `resume` is `save` first."""
    task = Task(SIZES[args.size][0], Shape(tokens=8), args.folder, brief=args.brief)
    if check == "parity":
        hf_zero.init_distributed()
        yield from over_ranks.check(task, args.device, dist.get_world_size())
    elif check == "save":
        yield from other_world.save(task, args.device)
    elif check == "resume":
        yield from other_world.resume(task, args.device)
    else:
        failed_rank.train_until_it_fails(task, args.device, int(args.more[0]), Path(args.more[1]))


def in_check(args: argparse.Namespace) -> None:
    """Run as a rank of a check. Rows are written as they come, so that a crash loses none that was seen."""
    if args.one_device:
        place.be_a_host_of_its_own()
    device = place.prepare(args.device)
    assert device is not None
    found: list[Row] = []
    for row in rows_on_one(args.check, args, device) if args.ranks == 1 else rows_on_several(args.check, args):
        found.append(row)
        if not dist.is_initialized() or dist.get_rank() == 0:
            rows.write(Path(args.out), found)
    if args.ranks > 1 and dist.is_initialized():
        dist.destroy_process_group()


def run_check(check: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """Run a check in processes of its own; one row more says where it did not come to its end."""
    limit_s = (ON_ONE if args.ranks == 1 else ON_SEVERAL)[check] * args.patience
    program = _program(check, args, folder)
    if args.ranks == 1:
        return _ended(check, folder, ranks.run(program, 1, timeout_s=limit_s))
    if check == "speed":
        return list(peers.check(args.device, args.size, args.ranks, folder, limit_s))
    if check == "failures":
        return list(failed_rank.check([*program, "--more"], args.ranks, folder, limit_s))
    steps = [(check, args.ranks)]
    if check == "resume":
        steps = [("save", args.ranks), ("resume", max(1, args.ranks // 2))]
    found = []
    for step, count in steps:
        ended = ranks.run_under_torchrun(_program(step, args, folder), count, timeout_s=limit_s)
        found += _ended(step, folder, [ended])
    return found


def _program(check: str, args: argparse.Namespace, folder: Path) -> list[str]:
    files = {"save": "checkpoints", "resume": "checkpoints"}.get(check, check)
    program = [sys.argv[0], "--check", check, "--out", str(folder / f"{check}.json"), "--device", args.device]
    program += ["--brief"] * args.brief + ["--one-device"] * args.one_device
    program += ["--ranks", str(args.ranks), "--size", args.size]
    return [*program, "--folder", str(Path(args.folder or folder) / files)]


def _ended(check: str, folder: Path, ended: Sequence[ranks.Ended]) -> list[Row]:
    out = folder / f"{check}.json"
    found = rows.read(out) if out.exists() else []
    for rank, end in enumerate(ended):
        if end.status != 0:
            how = "did not end in time" if end.status is None else f"ended with status {end.status}"
            lines = [line.strip() for line in end.text.splitlines() if line.strip()]
            said = next((line for line in lines if "Error" in line), lines[-1] if lines else "it printed nothing")
            status = NOT_SEEN if check == "theirs" else FAILED  # what DeepSpeed cannot do here is no fault of ours
            found.append(Row(f"{check}, rank {rank}", status, f"it {how}: {said[:300]}"))
            print(f"---- {check}, rank {rank}\n{end.text}", file=sys.stderr)
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=1, help="GPUs to use (0: all of the host, two at least)")
    add("--one-device", action="store_true", help="let all ranks share the first GPU, over NCCL's sockets")
    add("--device", choices=place.CHOICES, default="accelerator", help="torch's accelerator, or the rehearsal device")
    add("--size", choices=tuple(SIZES), default="full", help="of the models")
    add("--only", help="checks, comma-separated")
    add("--brief", action="store_true", help="train a few of the settings only, to rehearse")
    add("--folder", default="", help="where files of offload go, a local disk (default: a temporary folder)")
    add("--results", action="store_true", help="add the table to RESULTS.md")
    add("--skip-without-gpu", action="store_true", help="exit with status 0 where there are too few accelerators")
    add("--patience", type=float, default=1.0, help="factor on the time limits, for a slow machine")
    add("--check", help=argparse.SUPPRESS)
    add("--out", help=argparse.SUPPRESS)
    add("--more", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    checks = tuple(ON_ONE if args.ranks == 1 else ON_SEVERAL)
    # Ranks that share a GPU take turns on it: their speed says nothing.
    default = [name for name in checks if not (args.one_device and name == "speed")]
    args.only = args.only.split(",") if args.only else default
    if unknown := [name for name in args.only if name not in checks]:
        parser.error(f"no check is named {', '.join(unknown)}; there are {', '.join(checks)}")
    return args


def choose_ranks(args: argparse.Namespace) -> None:
    """Set how many ranks train; leave with status 2 where there are not as many devices."""
    there = 0 if place.prepare(args.device) is None else torch.accelerator.device_count()
    wanted = str(args.ranks) if args.ranks else "two or more"
    args.ranks = args.ranks or max(2, there)
    if there < (1 if args.one_device else args.ranks):
        print(f"smoke: skipped, it needs {wanted} accelerator{'s' * (wanted != '1')}, and torch finds {there} here.")
        sys.exit(0 if args.skip_without_gpu else 2)


def main() -> None:
    args = parse(sys.argv[1:])
    if args.check:
        in_check(args)
        return
    choose_ranks(args)
    facts = place.facts(args.device) | {"ranks": args.ranks, "variables": rows.set_variables()}
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    seen: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for check in args.only:
            print(f"[smoke] {check} ...", file=sys.stderr, flush=True)
            seen += run_check(check, args, Path(folder))
    print(f"\n{rows.as_text(seen)}\n\n{rows.summary(seen)}")
    if args.results:
        title = "Smoke run on one GPU" if args.ranks == 1 else f"Smoke run on {args.ranks} GPUs"
        with open(ranks.REPOSITORY / "RESULTS.md", "a") as file:
            file.write(rows.as_section(title, facts, shlex.join(["scripts/smoke.sh", *sys.argv[1:]]), seen))
    if not seen or any(row.status == FAILED for row in seen):
        sys.exit(1)


if __name__ == "__main__":
    main()
