"""What one GPU shows of hf_zero, in 8 minutes: scripts/gpu_smoke.sh sets up and starts this.

    python scripts/gpu_smoke.py                  # exit status 1 if anything is not as it should be
    python scripts/gpu_smoke.py --results        # add the table to RESULTS.md
    python scripts/gpu_smoke.py --only parity,memory
    python scripts/gpu_smoke.py --device lag --size tiny   # a rehearsal without hardware, on the device of tests/lag

Checks, each in processes of its own: parity (every stage and medium, with the losses of the CPU, and where the host
waits for the device), lifetimes (resume with fused AdamW, teardown, a second engine), shared (two ranks on the one
device, through the host), memory (peaks beside the plans of hf-zero estimate), speed (tokens per second of offload),
theirs (DeepSpeed's). Without an accelerator it says so and exits with status 2, with --skip-without-gpu 0.
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
from smoke import lifetimes, memory, parity, place, ranks, rows, shared_device, speed, waits
from smoke.rows import FAILED, NOT_SEEN, Row
from smoke.settings import Shape
from smoke.training import Task

SIZES = {
    # For numbers, for what is measured.
    "full": (ModelSize(256, 704, 4, 4, 2048), ModelSize(1024, 2816, 12, 16, 32768)),
    "tiny": (ModelSize(8, 16, 2, 2, 17), ModelSize(16, 32, 2, 2, 32)),
}
MEASURED_SHAPES = {"full": Shape(4, 512, steps=5), "tiny": Shape(tokens=8, steps=2)}
CHECKS = ("parity", "lifetimes", "shared", "memory", "speed", "theirs")
LIMIT_S = {"parity": 150, "lifetimes": 90, "shared": 120, "memory": 60, "speed": 60, "theirs": 240}


def rows_of(check: str, args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """What a check sees; in a process of its own, on each of its ranks."""
    for_numbers, for_measures = SIZES[args.size]
    numbers = Task(for_numbers, Shape(tokens=8 if args.size == "tiny" else 32), args.folder, brief=args.brief)
    measures = Task(for_measures, MEASURED_SHAPES[args.size], args.folder, brief=args.brief)
    if check == "parity":
        yield from parity.check(numbers, args.device)
        yield from parity.unseen(waits.can_count(device))
    elif check == "lifetimes":
        yield from lifetimes.check(numbers, args.device)
    elif check == "shared":
        yield from shared_device.check(numbers, args.device)
    elif check == "memory":
        yield from memory.check(measures, args.device)
    elif check == "speed":
        yield from speed.check(measures, args.device)
    else:
        yield from speed.check_theirs(measures, args.device)


def in_check(args: argparse.Namespace) -> None:
    """A check's own process. Rows are written as they come: what was seen before a crash is kept."""
    device = place.prepare(args.device)
    assert device is not None
    found: list[Row] = []
    for row in rows_of(args.check, args, device):
        found.append(row)
        if not dist.is_initialized() or dist.get_rank() == 0:
            rows.write(Path(args.out), found)


def run_check(check: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """Run a check in processes; a row more where it did not come to its end."""
    out = folder / f"{check}.json"
    mine = [sys.argv[0], "--check", check, "--out", str(out), "--device", args.device, "--size", args.size]
    mine += ["--brief"] * args.brief
    mine += ["--folder", str(Path(args.folder or folder) / check)]
    count, limit_s = (2, LIMIT_S[check]) if check == "shared" else (1, LIMIT_S[check])
    ended = ranks.run(mine, count, shares_device=True, timeout_s=limit_s * args.patience)
    found = rows.read(out) if out.exists() else []
    for rank, end in enumerate(ended):
        if end.status != 0:
            how = "did not end in time" if end.status is None else f"ended with status {end.status}"
            last = next((line for line in reversed(end.text.splitlines()) if line.strip()), "it printed nothing")
            status = NOT_SEEN if check == "theirs" else FAILED  # what DeepSpeed cannot do here is no fault of ours
            found.append(Row(f"{check}, rank {rank}", status, f"it {how}: {last.strip()[:300]}"))
            print(f"---- {check}, rank {rank}\n{end.text}", file=sys.stderr)
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=place.CHOICES, default="accelerator", help="torch's accelerator, or the rehearsal device")
    add("--size", choices=tuple(SIZES), default="full", help="of the models")
    add("--only", default=",".join(CHECKS), help="checks, comma-separated")
    add("--brief", action="store_true", help="train a few of the settings only, to rehearse")
    add("--folder", default="", help="where files of offload go, a local disk (default: a temporary folder)")
    add("--results", action="store_true", help="add the table to RESULTS.md")
    add("--skip-without-gpu", action="store_true", help="exit with status 0 where there is no accelerator")
    add("--patience", type=float, default=1.0, help="factor on the time limits, for a slow machine")
    add("--check", help=argparse.SUPPRESS)
    add("--out", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := [name for name in args.only if name not in CHECKS]:
        parser.error(f"no check is named {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    if args.check:
        in_check(args)
        return
    if place.prepare(args.device) is None:
        print("gpu_smoke: skipped, torch finds no accelerator here that it can use.")
        sys.exit(0 if args.skip_without_gpu else 2)
    facts = place.facts(args.device) | {"variables": rows.set_variables()}
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    seen: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for check in args.only:
            print(f"[gpu_smoke] {check} ...", file=sys.stderr, flush=True)
            seen += run_check(check, args, Path(folder))
    print(f"\n{rows.as_text(seen)}\n\n{rows.summary(seen)}")
    if args.results:
        command = shlex.join(["scripts/gpu_smoke.sh", *sys.argv[1:]])
        with open(ranks.REPOSITORY / "RESULTS.md", "a") as file:
            file.write(rows.as_section("Smoke run on one GPU", facts, command, seen))
    if not seen or any(row.status == FAILED for row in seen):
        sys.exit(1)


if __name__ == "__main__":
    main()
