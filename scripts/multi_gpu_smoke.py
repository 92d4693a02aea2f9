"""What several GPUs of a host show of hf_zero, over their own backend: scripts/multi_gpu_smoke.sh starts this.

    python scripts/multi_gpu_smoke.py                  # all GPUs; exit status 1 if anything is not as it should be
    python scripts/multi_gpu_smoke.py --ranks 4 --results
    python scripts/multi_gpu_smoke.py --device lag --size tiny   # a rehearsal, two ranks on the device of tests/lag

Checks: parity (under torchrun: every stage and medium with the losses of one process, and the waits and collectives of
a step), killed (the others end with a sentence, within seconds), resume (a checkpoint at another number of ranks),
speed (tokens per second beside DDP and FSDP2). With less than two GPUs it says so and exits with status 2.
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
from smoke import killed_rank, other_world, over_ranks, peers, place, ranks, rows
from smoke.rows import FAILED, Row
from smoke.settings import Shape
from smoke.training import Task

import hf_zero

SIZES = {"full": ModelSize(256, 704, 4, 4, 2048), "tiny": ModelSize(8, 16, 2, 2, 17)}
CHECKS = ("parity", "killed", "resume", "speed")
LIMIT_S = {"parity": 240, "killed": 90, "save": 90, "resume": 90, "speed": 240}


def rows_of(check: str, task: Task, args: argparse.Namespace) -> Iterator[Row]:
    """What a check sees, on each of its ranks."""
    if check == "parity":
        hf_zero.init_distributed()
        yield from over_ranks.check(task, args.device, dist.get_world_size())
    elif check == "save":
        yield from other_world.save(task, args.device)
    elif check == "resume":
        yield from other_world.resume(task, args.device)
    else:
        setting = killed_rank.KILLED[int(args.more[0])]
        killed_rank.train_until_killed(task, setting, args.device, Path(args.more[1]))


def in_check(args: argparse.Namespace) -> None:
    """A rank of a check. Rank 0 writes rows as they come."""
    assert place.prepare(args.device) is not None
    found: list[Row] = []
    for row in rows_of(args.check, Task(SIZES[args.size], Shape(tokens=8), args.folder, brief=args.brief), args):
        found.append(row)
        if dist.get_rank() == 0:
            rows.write(Path(args.out), found)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_check(check: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """Rows of a check; one more where it did not come to its end."""
    limit_s = LIMIT_S[check] * args.patience
    if check == "speed":
        return list(peers.check(args.device, args.size, args.ranks, folder, limit_s))
    if check == "killed":
        mine = _program("killed", args, folder)
        return list(killed_rank.check([*mine, "--more"], args.ranks, folder, limit_s))
    if check == "resume":
        return _under_torchrun("save", args, folder, args.ranks) + _under_torchrun("resume", args, folder, args.other)
    return _under_torchrun(check, args, folder, args.ranks)


def _program(check: str, args: argparse.Namespace, folder: Path) -> list[str]:
    files = {"save": "checkpoints", "resume": "checkpoints"}.get(check, check)
    program = [sys.argv[0], "--check", check, "--out", str(folder / f"{check}.json"), "--device", args.device]
    program += ["--brief"] * args.brief
    return [*program, "--size", args.size, "--folder", str(Path(args.folder or folder) / files)]


def _under_torchrun(check: str, args: argparse.Namespace, folder: Path, count: int) -> list[Row]:
    out = folder / f"{check}.json"
    ended = ranks.run_under_torchrun(_program(check, args, folder), count, timeout_s=LIMIT_S[check] * args.patience)
    found = rows.read(out) if out.exists() else []
    if ended.status != 0:
        how = "did not end in time" if ended.status is None else f"ended with status {ended.status}"
        said = [line.strip() for line in ended.text.splitlines() if "Error" in line] or ["no error"]
        found.append(Row(f"{check}, {count} ranks", FAILED, f"it {how}: {said[0][:300]}"))
        print(f"---- {check}\n{ended.text}", file=sys.stderr)
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=0, help="GPUs to use, at least 2 (default: all)")
    add("--device", choices=place.CHOICES, default="accelerator", help="torch's accelerator, or the rehearsal device")
    add("--size", choices=tuple(SIZES), default="full", help="of the models")
    add("--only", default=",".join(CHECKS), help="checks, comma-separated")
    add("--brief", action="store_true", help="train a few of the settings only, to rehearse")
    add("--folder", default="", help="where files of offload go, a local disk (default: a temporary folder)")
    add("--results", action="store_true", help="add the table to RESULTS.md")
    add("--patience", type=float, default=1.0, help="factor on the time limits, for a slow machine")
    add("--check", help=argparse.SUPPRESS)
    add("--out", help=argparse.SUPPRESS)
    add("--more", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := [name for name in args.only if name not in CHECKS]:
        parser.error(f"no check is named {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    return args


def choose_ranks(args: argparse.Namespace) -> None:
    """How many ranks train, and how many resume; leaves with status 2 where there are not two devices."""
    there = 0 if place.prepare(args.device) is None else torch.accelerator.device_count()
    args.ranks = args.ranks or there
    if not 2 <= args.ranks <= there:
        wanted = "two or more" if args.ranks < 2 else str(args.ranks)
        print(f"multi_gpu_smoke: skipped, it needs {wanted} accelerators, and torch finds {there} here.")
        sys.exit(2)
    args.other = max(1, args.ranks // 2)


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
            print(f"[multi_gpu_smoke] {check} ...", file=sys.stderr, flush=True)
            seen += run_check(check, args, Path(folder))
    print(f"\n{rows.as_text(seen)}\n\n{rows.summary(seen)}")
    if args.results:
        command = shlex.join(["scripts/multi_gpu_smoke.sh", *sys.argv[1:]])
        with open(ranks.REPOSITORY / "RESULTS.md", "a") as file:
            file.write(rows.as_section(f"Smoke run on {args.ranks} GPUs", facts, command, seen))
    if not seen or any(row.status == FAILED for row in seen):
        sys.exit(1)


if __name__ == "__main__":
    main()
