"""Checkpoints of hf_zero beside DeepSpeed's, torch DCP's (FSDP2) and the disk: save, load, consolidation, in one run.

    python scripts/bench_checkpoint.py FOLDER                      # 500 M parameters, 2 and then 4 ranks, some 20 GB
    MALLOC_MMAP_THRESHOLD_=8388608 python scripts/bench_checkpoint.py FOLDER --worlds 4      # within 24 GB of memory
    python scripts/bench_checkpoint.py FOLDER --params 50 --worlds 2 --rounds 3
    python scripts/bench_checkpoint.py FOLDER --peers-python ~/peers/bin/python      # one that has DeepSpeed
    python scripts/bench_checkpoint.py FOLDER --only stall                           # or: --only files

All train the same model in fp32 with AdamW; a save holds weights and both moments. "ours" and DeepSpeed are at stage
2, where a load gathers all parameters on every rank; "stage3" is ours with sharded parameters, as FSDP2's are. Per
round every variant saves and loads once in processes of its own, which work on one after the other. "dd" writes the
bytes of hf_zero's checkpoint with as many processes, through the page cache and past it, each with an fsync; the
faster one is the base. Every save but DeepSpeed's and DCP's ends with its bytes on the disk, so theirs are followed by
an fsync, which counts.

Cold: all files of the checkpoint were evicted from the page cache (fsync, POSIX_FADV_DONTNEED). Warm: they were read
just before. "cp" copies the consolidated file and syncs the copy. CPU seconds are those of all processes; "anon" is
the highest anonymous memory of a process over that before (RssAnon, sampled).

Stall: what a save in the background (`checkpoint.async`) at stage 3 keeps the training for, the first of a process and
later ones (the median of 7). "memory copy" copies as many bytes within memory that was used before, after each save.

Checked: after each load the next losses are those after the save, to the bit; consolidated weights are those of the
model, to the bit. Exit status 1 if not, or if a limit is missed: save 1.3 x dd and ahead of peers, stall 1.2 x memory
copy, consolidation 2 x cp (1.3 x without checksums) within 250 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from torch import nn

WIDTH = 2048
ANON_LIMIT = 250e6
LIMITS = {
    ("save", "ours"): 1.3,
    ("stall", "ours"): 1.2,
    ("consolidate", "ours"): 2.0,
    ("consolidate", "ours, no checksums"): 1.3,
}
PEERS = ("deepspeed", "dcp")
SAMPLE_S = 0.005
COPY_BYTES = 256 << 20  # of a copy in memory: far more than caches hold
LATER_SAVES = 7
SETTLE_S = 1.0  # what is under way in the background is over

Figures = dict[str, float]  # seconds, cpu, anon


# ---------------------------------------------------------------- measuring
def cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def measured() -> Iterator[Figures]:
    """Measure the block on all ranks; the figures are there on exit."""
    found: Figures = {}
    before, peak, ended = benchlib.resident(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            peak[0] = max(peak[0], benchlib.resident())

    watcher = threading.Thread(target=watch)
    dist.barrier()
    watcher.start()
    cpu, start = cpu_seconds(resource.RUSAGE_SELF), time.perf_counter()
    yield found
    dist.barrier()
    mine = (time.perf_counter() - start, cpu_seconds(resource.RUSAGE_SELF) - cpu)
    ended.set()
    watcher.join()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (*mine, max(peak[0] - before, 0)))
    seconds, cpus, peaks = zip(*everyone, strict=True)
    found.update(seconds=max(seconds), cpu=sum(cpus), anon=max(peaks))


def command(*words: str) -> Figures:
    """Measure a process, or several, given as words that "&&&" parts."""
    calls = [call.split("\0") for call in "\0".join(words).split("\0&&&\0")]
    cpu, start, peak = cpu_seconds(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    logs = [subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for call in calls]
    while any(process.poll() is None for process in logs):
        for process in logs:
            if process.returncode is None:
                peak = max(peak, benchlib.resident(pid=process.pid))
        time.sleep(SAMPLE_S)
    seconds = time.perf_counter() - start
    for process, call in zip(logs, calls, strict=True):
        if process.returncode:
            sys.exit(f"{' '.join(call)} failed: {(process.stdout.read() if process.stdout else b'')[-2000:]!r}")
    return {"seconds": seconds, "cpu": cpu_seconds(resource.RUSAGE_CHILDREN) - cpu, "anon": peak}


def cache(folder: Path, *, keep: bool) -> None:
    """Have all files of a folder in the page cache, or none."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if keep:
            while os.read(descriptor, 4 << 20):
                pass
        else:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def medians(found: Sequence[Figures]) -> Figures:
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


# ---------------------------------------------------------------- the variants
def build(millions: float) -> nn.Module:
    torch.manual_seed(0)
    layers = max(1, round(millions * 1e6 / (WIDTH * WIDTH)))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


class Ours:
    """hf_zero at stage 2, and the base of the others: `step` trains, `optimizer` has the groups."""

    stage = 2
    in_background = False
    syncs = True  # a save's bytes are on the disk when it is over

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        self.start(model)

    def start(self, model: nn.Module) -> None:
        import hf_zero

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": self.stage},
            "checkpoint": {"async": self.in_background},
        }
        self.engine: Any = hf_zero.initialize(model=model, optimizer=self.optimizer, config=config)[0]

    def step(self, number: int) -> float:
        batch = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
        loss = self.engine(batch).square().mean()
        self.update(loss)
        return float(loss)

    def update(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)
        self.engine.step()

    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="t")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="t")

    def figures(self, folder: Path) -> tuple[dict[str, Figures], bool]:
        """Measure a save, a load from the disk and one from the page cache; True if the next losses stayed."""
        with measured() as save:
            self.save(folder)
            if not self.syncs:
                sync(folder)
        found = {"save": save}
        losses = [next_losses(self)]
        for how in ("cold", "warm"):
            if dist.get_rank() == 0:
                cache(folder, keep=how == "warm")
            with measured() as found[f"load {how}"]:
                self.load(folder)
            losses.append(next_losses(self))
        return found, losses[0] == losses[1] == losses[2]


class Stage3(Ours):
    """Parameters are sharded, as FSDP2's are: a load need not gather them."""

    stage = 3


class InBackground(Stage3):
    """Measures how long a save in the background stops the training. At stage 3 there is memory for the copy."""

    in_background = True

    def figures(self, folder: Path) -> tuple[dict[str, Figures], bool]:
        """Measure the first save, a later one, and a copy of as many bytes in memory that was used before."""
        mine = self.engine.optimizer
        tensors = [*(param for group in mine.param_groups for param in group["params"])]
        tensors += [value for state in mine.state.values() for value in state.values() if value.numel() > 1]
        times = max(1, sum(one.nbytes for one in tensors) // COPY_BYTES)
        source = torch.zeros(sum(one.nbytes for one in tensors) // times, dtype=torch.uint8)
        target = source.clone()
        self.step(1)
        self.step(2)  # the memory of the first copy is taken beside these
        stalls: list[Figures] = []
        copies: list[Figures] = []
        for _ in range(1 + LATER_SAVES):
            time.sleep(SETTLE_S)
            with measured() as stall:
                self.save(folder)
            self.engine.finish_saves()
            with measured() as copy:
                for _ in range(times):
                    target.copy_(source)
            stalls.append(stall)
            copies.append(copy)
        found = {"stall first": stalls[0], "stall first, memory copy": copies[0]}
        found |= {"stall later": medians(stalls[1:]), "stall later, memory copy": medians(copies[1:])}
        before = next_losses(self)
        self.load(folder)
        return found, next_losses(self) == before


class DeepSpeed(Ours):
    syncs = False

    def start(self, model: nn.Module) -> None:
        import deepspeed  # type: ignore[import-not-found, unused-ignore]

        zero = {"stage": 2, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        self.engine = deepspeed.initialize(model=model, optimizer=self.optimizer, config=config)[0]


class Dcp(Ours):
    syncs = False

    def start(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        self.engine = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.engine, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=folder / "t")

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=folder / "t")
        set_state_dict(
            self.engine, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


VARIANTS: dict[str, type[Ours]] = {
    "ours": Ours,
    "stage3": Stage3,
    "async": InBackground,
    "deepspeed": DeepSpeed,
    "dcp": Dcp,
}


def run_rank(args: argparse.Namespace) -> None:
    """One round of a variant."""
    torch.set_num_threads(1)
    if args.rank_of == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    variant = VARIANTS[args.rank_of](build(args.params))
    variant.step(0)  # makes the moments; the weights stay those of `build`: the learning rate is 0
    figures, right = variant.figures(args.folder / args.rank_of)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps({"figures": figures, "right": right}))
    dist.barrier()
    dist.destroy_process_group()


def sync(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for path in (path for path in folder.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())


def next_losses(variant: Ours) -> list[float]:
    """They depend on weights and moments."""
    for group in variant.groups():
        group["lr"] = 1e-3
    return [variant.step(number) for number in range(1, 4)]


# ---------------------------------------------------------------- the launcher
def job(args: argparse.Namespace, name: str, world: int) -> dict[str, Any]:
    out = args.folder / f"{name}.json"
    shutil.rmtree(args.folder / name, ignore_errors=True)
    os.sync()
    python = args.peers_python if name == "deepspeed" else sys.executable
    arguments = [__file__, str(args.folder), "--params", str(args.params), "--rank-of", name, "--out", str(out)]
    benchlib.run_job(python, world, arguments, timeout_s=args.timeout)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def dd(folder: Path, world: int, nbytes: int, flags: str) -> Figures:
    shutil.rmtree(folder / "dd", ignore_errors=True)
    (folder / "dd").mkdir()
    os.sync()
    words: list[str] = []
    for rank in range(world):
        words += ["&&&"] if rank else []
        words += ["dd", "if=/dev/zero", f"of={folder}/dd/{rank}", "bs=4M", f"count={nbytes // world >> 22}"]
        words += ["conv=fsync", *flags.split()]
    found = command(*words)
    shutil.rmtree(folder / "dd")
    return found


def consolidations(args: argparse.Namespace, names: Sequence[str]) -> dict[str, tuple[list[str], Path]]:
    """Name -> command, and the file or folder that it makes."""
    folder, out = args.folder, args.folder / "out"
    mine = [sys.executable, str(folder / "ours/t/consolidate.py"), str(folder / "ours/t"), str(out / "a.safetensors")]
    convert = "import sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert;"
    dcp = [sys.executable, "-c", f"{convert} convert(*sys.argv[1:])", str(folder / "dcp/t"), str(out / "a.pt")]
    script = folder / "deepspeed/zero_to_fp32.py"
    deepspeed = [args.peers_python, str(script), str(folder / "deepspeed"), str(out), "--safe_serialization"]
    source = f"cp {folder}/cp/a.safetensors {out} && sync {out}/a.safetensors"
    commands = {
        "ours": (mine, out / "a.safetensors"),
        "ours, no checksums": ([*mine, "--no-verify"], out / "a.safetensors"),
        "deepspeed": (deepspeed, out),
        "dcp": (dcp, out / "a.pt"),
        "cp": (["sh", "-c", source], out / "a.safetensors"),
    }
    return {name: call for name, call in commands.items() if name not in PEERS or name in names}


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    if path.suffix == ".pt":
        content: dict[str, torch.Tensor] = torch.load(path, mmap=True)["model"]
        return content
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def consolidate(args: argparse.Namespace, names: Sequence[str], add: Callable[..., None]) -> list[str]:
    """Measure every way, cold and warm; returns those whose weights are wrong."""
    wrong = []
    want = build(args.params).state_dict()
    reference = args.folder / "cp" / "a.safetensors"
    reference.parent.mkdir(exist_ok=True)
    for name, (call, made) in consolidations(args, names).items():
        for how in ("cold", "warm"):
            shutil.rmtree(args.folder / "out", ignore_errors=True)
            (args.folder / "out").mkdir()
            os.sync()
            cache(args.folder / name.split(",")[0], keep=how == "warm")
            add(f"consolidate {how}", name, command(*call))
        if name == "ours":
            shutil.copyfile(made, reference)
        got = weights_in(made)
        if got.keys() != want.keys() or not all(torch.equal(got[key], value) for key, value in want.items()):
            wrong.append(f"consolidation by {name}: other weights")
        del got
    shutil.rmtree(args.folder / "out")
    return wrong


class Table:
    """Figures of all rounds, by what was done and by whom."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], list[Figures]] = {}

    def add(self, what: str, name: str, figures: Mapping[str, float]) -> None:
        self.rows.setdefault((what, name), []).append(dict(figures))

    def ratio(self, what: str, name: str, base: str) -> float:
        """Median over rounds of the ratio of times within a round."""
        both = zip(self.rows[what, name], self.rows[what, base], strict=True)
        return statistics.median(mine["seconds"] / other["seconds"] for mine, other in both)

    def text(self) -> str:
        lines = [f"{'':18} {'':20} {'seconds':>8} {'x base':>7} {'CPU s':>7} {'anon MB':>8}"]  # base: see base_of
        for (what, name), rounds in self.rows.items():
            base = base_of(what)
            ratio = f"{self.ratio(what, name, base):.2f}" if (what, base) in self.rows else ""
            middle = medians(rounds)
            line = f"{what:18} {name:20} {middle['seconds']:8.2f} {ratio:>7} {middle['cpu']:7.2f}"
            lines.append(f"{line} {middle['anon'] / 1e6:8.0f}")
        return "\n".join(lines)

    def missed(self) -> list[str]:
        found = []
        for what, name in self.rows:
            limit = LIMITS.get((what.split()[0], name))
            if limit and self.ratio(what, name, base_of(what)) > limit:
                found.append(f"{what} by {name}: more than {limit} x {base_of(what)}")
            if what.startswith("consolidate") and name.startswith("ours"):
                worst = max(one["anon"] for one in self.rows[what, name])
                found += [f"{what}: {worst / 1e6:.0f} MB of anonymous memory"] if worst > ANON_LIMIT else []
            if what == "save" and name in PEERS and self.ratio(what, name, "ours") < 1:
                found.append(f"save: {name} is faster")
        return found


def base_of(what: str) -> str:
    return {"save": "dd", "stall": "memory copy", "load": "ours", "consolidate": "cp"}[what.split()[0]]


def measure(args: argparse.Namespace, world: int, names: Sequence[str]) -> tuple[Table, list[str]]:
    table, wrong = Table(), []
    for number in range(args.rounds):
        for name in [*(names if args.only != "stall" else []), *(["async"] if args.only != "files" else [])]:
            result = job(args, name, world)
            for what, figures in result["figures"].items():
                what, _, base = what.partition(", ")
                table.add(what, base or ("ours" if name == "async" else name), figures)
            wrong += [] if result["right"] else [f"{name}: other losses after a load"]
        if args.only == "stall":
            continue
        nbytes = sum(path.stat().st_size for path in (args.folder / "ours/t/zero").glob("*.safetensors"))
        ways = {"dd, page cache": dd(args.folder, world, nbytes, ""), "dd, direct": {}}
        ways["dd, direct"] = dd(args.folder, world, nbytes, "oflag=direct")
        for name, figures in ways.items():
            table.add("save", name, figures)
        table.add("save", "dd", min(ways.values(), key=lambda one: one["seconds"]))
        wrong += consolidate(args, names, table.add)
        print(f"{world} ranks: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return table, wrong


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="on the disk to be measured; what the script makes there it deletes")
    add("--params", type=float, default=500.0, help="millions")
    add("--only", choices=["files", "stall"], help="all but the saves in the background, or these alone")
    add("--worlds", type=lambda text: [int(one) for one in text.split(",")], default=[2, 4])
    add("--rounds", type=int, default=3)
    add("--peers-python", default=sys.executable, help="of the environment that has DeepSpeed")
    add("--timeout", type=float, default=900.0, help="seconds for one job")
    add("--rank-of", choices=VARIANTS, help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.rank_of:
        run_rank(args)
        return
    args.folder = args.folder / f"bench_checkpoint-{os.getpid()}"
    args.folder.mkdir(parents=True)
    names = ["ours", "stage3", *(["deepspeed"] if benchlib.has_deepspeed(args.peers_python) else []), "dcp"]
    problems = []
    try:
        for world in args.worlds:
            table, wrong = measure(args, world, names)
            print(f"\n{world} ranks, {args.params:g} M parameters, medians of {args.rounds} rounds")
            print(table.text())
            problems += [f"{world} ranks: {problem}" for problem in [*wrong, *table.missed()]]
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)
    print("\n".join(problems) or "\nall results right, all limits held")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
