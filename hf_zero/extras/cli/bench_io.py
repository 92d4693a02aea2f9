"""`hf-zero bench io`: which `aio` settings read and write a disk fastest.

Every setting is measured once, then the best few again, in turn, because a disk's speed changes from second to second.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.checkpoint.consolidate import parse_bytes
from hf_zero.config.resolved import Aio
from hf_zero.extras.cli.text import plural, table

if TYPE_CHECKING:
    import torch

SUMMARY = "reading and writing a folder's disk, and the best aio settings for it"

_MODES = ("read", "write")
_FINALISTS, _FINAL_ROUNDS = 4, 3


@dataclass(frozen=True)
class Setting:
    engine: str
    aio: Aio


@dataclass
class Result:
    setting: Setting
    speeds: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in _MODES})  # bytes per second
    fio: dict[str, float] = field(default_factory=dict)

    def speed(self, mode: str) -> float:
        return statistics.median(self.speeds[mode])

    @property
    def both(self) -> float:
        """Return the bytes per second of reading and writing the same amount, as an optimizer step does."""
        return 2 / sum(1 / self.speed(mode) for mode in _MODES)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where nvme_path points, or will")
    parser.add_argument("--size", type=parse_bytes, help="of the test file (default 1GiB, quick 128MiB)")
    parser.add_argument("--quick", action="store_true", help="fewer settings, a smaller file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fio", action="store_true", help="measure with fio, too, if it is installed")


def run(args: argparse.Namespace) -> None:
    size = args.size or (128 << 20 if args.quick else 1 << 30)
    size -= size % (1 << 20)
    path = args.folder / f"hf_zero_bench_io.{os.getpid()}"
    problem = _unusable(path, size)
    if problem is None and args.fio and not shutil.which("fio"):
        problem = "--fio: there is no fio on PATH (apt-get install fio)"
    if problem is not None:
        raise argparse.ArgumentError(None, problem)
    try:
        results, direct = _sweep(path, size, args)
    finally:
        path.unlink(missing_ok=True)
    best = max(results, key=lambda result: (len(result.speeds["read"]), result.both))
    if args.json:
        print(json.dumps(_as_json(results, best, direct, size)))
    else:
        _print(results, best, direct, size)


def fio_speed(path: Path, size: int, setting: Setting, mode: str, fio_engine: str) -> float:
    """Measure the bytes per second of fio on the same file, with O_DIRECT; each of its threads takes its own part."""
    aio, part = setting.aio, size // setting.aio.intra_op_parallelism
    command = ["fio", "--name=x", f"--filename={path}", f"--ioengine={fio_engine}", f"--rw={mode}", "--thread"]
    command += [f"--bs={aio.block_size}", f"--iodepth={aio.queue_depth}", "--direct=1", f"--size={part}"]
    command += [f"--numjobs={aio.intra_op_parallelism}", f"--offset_increment={part}", "--group_reporting"]
    done = subprocess.run([*command, "--output-format=json"], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"fio failed: {(done.stderr or done.stdout).strip()[-300:]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][mode]
    return float(job["io_bytes"] / (max(job["runtime"], 1) / 1e3))


def our_speed(path: Path, buffer: torch.Tensor, setting: Setting, mode: str) -> float:
    """Measure the bytes per second of one request for all of the buffer."""
    from hf_zero.native.aio import AioQueue

    queue = AioQueue(setting.aio, engine=setting.engine)
    with contextlib.closing(queue), contextlib.closing(queue.open(path)) as file:
        start = time.perf_counter()
        queue.wait(queue.write(file, buffer, 0) if mode == "write" else queue.read(file, buffer, 0))
        return buffer.numel() / (time.perf_counter() - start)


# ---------------------------------------------------------------- measuring
def _settings(quick: bool) -> list[Setting]:
    from hf_zero.errors import OffloadError
    from hf_zero.native.aio import AioQueue

    engines = ["threads"]
    with contextlib.suppress(OffloadError):  # said by the table: it has no line of io_uring
        AioQueue(engine="io_uring").close()
        engines.insert(0, "io_uring")
    blocks = (1 << 20,) if quick else (1 << 18, 1 << 20, 1 << 22)
    depths = (8, 32)
    threads = (1,) if quick else (1, 2)
    aios = [Aio(*values) for values in itertools.product(blocks, depths, threads)]
    return [Setting(engine, aio) for engine in engines for aio in aios]


def _sweep(path: Path, size: int, args: argparse.Namespace) -> tuple[list[Result], bool]:
    """Results, and whether O_DIRECT was used."""
    from hf_zero.native.aio import AioQueue
    from hf_zero.native.host_memory import transfer_memory

    buffer = transfer_memory(size).fill_(3)
    with contextlib.closing(AioQueue()) as queue, contextlib.closing(queue.open(path, create=True)) as file:
        # Later writes then find their space allocated, as in a store.
        queue.wait(queue.write(file, buffer, 0))
        direct = file.direct
    results = [Result(setting) for setting in _settings(args.quick)]
    total = len(results) + min(_FINALISTS, len(results)) * _FINAL_ROUNDS
    with _progress(total) as step:
        for result in results:
            _measure(path, buffer, result)
            step(result.setting)
        finalists = sorted(results, key=lambda result: -result.both)[:_FINALISTS]
        for _ in range(_FINAL_ROUNDS):
            for result in finalists:
                _measure(path, buffer, result)
                step(result.setting)
        if args.fio:
            for result in finalists:
                for mode in _MODES:
                    engines = ("libaio", "io_uring") if result.setting.engine == "io_uring" else ("libaio",)
                    result.fio[mode] = max(fio_speed(path, size, result.setting, mode, name) for name in engines)
    return results, direct


def _measure(path: Path, buffer: torch.Tensor, result: Result) -> None:
    for mode in _MODES:
        result.speeds[mode].append(our_speed(path, buffer, result.setting, mode))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Yields a function to call after every measurement; shows a line where stderr is a terminal."""
    shown = sys.stderr.isatty()
    count = itertools.count(1)

    def step(setting: Setting) -> None:
        if shown:
            print(f"\r\x1b[K[{next(count)}/{total}] {_describe(setting)}", end="", file=sys.stderr, flush=True)

    try:
        yield step
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _unusable(probe: Path, size: int) -> str | None:
    """Return one line that says why a file of this size cannot be made there; None where it can."""
    folder = probe.parent
    if not folder.exists():
        return f"{folder} does not exist"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if size < 1 << 20:
        return "--size: give at least 1MiB"
    try:
        probe.touch()
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    if free < size:
        return f"{folder} has {free >> 20} MiB free, the test file needs {size >> 20} MiB (see --size)"
    return None


# ---------------------------------------------------------------- output
def _describe(setting: Setting) -> str:
    aio = setting.aio
    threads = plural(aio.intra_op_parallelism, "thread")
    return f"{setting.engine}, {aio.block_size >> 10} KiB, depth {aio.queue_depth}, {threads}"


def _as_json(results: Sequence[Result], best: Result, direct: bool, size: int) -> dict[str, Any]:
    return {
        "size": size,
        "direct": direct,
        "results": [
            {
                "engine": result.setting.engine,
                "block_size": result.setting.aio.block_size,
                "queue_depth": result.setting.aio.queue_depth,
                "threads": result.setting.aio.intra_op_parallelism,
                **{f"{mode}_gb_s": round(result.speed(mode) / 1e9, 3) for mode in _MODES},
                **{f"fio_{mode}_gb_s": round(speed / 1e9, 3) for mode, speed in result.fio.items()},
            }
            for result in results
        ],
        "engine": best.setting.engine,
        "aio": asdict(best.setting.aio),
    }


def _print(results: Sequence[Result], best: Result, direct: bool, size: int) -> None:
    with_fio = any(result.fio for result in results)
    heads = ["engine", "block KiB", "depth", "threads", "read GB/s", "write GB/s"]
    rows = [heads + (["fio read", "fio write"] if with_fio else [])]
    for result in results:
        aio = result.setting.aio
        row = [result.setting.engine, *map(str, (aio.block_size >> 10, aio.queue_depth, aio.intra_op_parallelism))]
        row += [f"{result.speed(mode) / 1e9:.2f}" for mode in _MODES]
        row += [f"{result.fio[mode] / 1e9:.2f}" if mode in result.fio else "" for mode in _MODES if with_fio]
        rows.append(row)
    print(f"{size >> 20} MiB, {'O_DIRECT' if direct else 'through the page cache: O_DIRECT is not possible here'}")
    head, *lines = table(rows)
    print(head)
    for line, result in zip(lines, results, strict=True):
        print(f"{line}  <- best" if result is best else line)
    if best.setting.engine != results[0].setting.engine:
        print(f"\nHF_ZERO_AIO_ENGINE={best.setting.engine} was fastest: set it in the environment.")
    print(f"\nBest, for the configuration:\n{json.dumps({'aio': asdict(best.setting.aio)}, indent=2)}")
