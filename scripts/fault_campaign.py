"""Random faults of one rank of three: every rank raises an error of hf_zero, and a restart ends in the right run.

A rank gets a signal, raises or is out of memory while it trains, saves, evaluates or generates. Then the job is
started again and goes on from the newest whole checkpoint. Losses and weights must be those of a run without a fault,
every checkpoint that counts as whole must be, and no process and no file may be left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hf_zero import errors
from hf_zero.extras.cli.main import main as hf_zero_command
from hf_zero.hf.trainer.resume import numbered, why_torn
from tests.harness import ranks
from tests.harness.ranks import RankFailure, try_ranks
from tests.hf.fault_runs import STAGES, WORLD_SIZE, Case, train

LIMIT_S = 60.0
_TIMEOUTS = {"grace": 0.5, "stalled": 0.2, "presence": 4.0}


def run(case: Case | None, stage: int, folder: Path) -> Any:
    (folder / "tmp").mkdir(exist_ok=True)
    env = {"TMPDIR": str(folder / "tmp")}
    job: tuple[Any, tuple[Any, ...], dict[str, Any]] = (train, (case, stage, str(folder)), {})
    return try_ranks(job, WORLD_SIZE, timeout=LIMIT_S, init_group=False, env=env, timeouts=_TIMEOUTS)


@functools.cache
def unbroken(stage: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        ended = run(None, stage, Path(folder))
        assert not any(isinstance(one, RankFailure) for one in ended.outcomes), ended
        return ended.outcomes[0]


def problems_of_faults(case: Case, ended: Any, struck: bool) -> Iterator[str]:
    """Yield what is wrong with the end of the job that had the fault."""
    if ended.hang:
        yield ended.hang
    elif (case.fault == "SIGSTOP" or not struck) and any(one != unbroken(case.stage) for one in ended.outcomes):
        yield f"a rank that was stopped for a while changed the run: {ended.outcomes}"
    for rank, one in enumerate(ended.outcomes):
        if rank == case.rank or not isinstance(one, RankFailure):
            continue
        kind = getattr(errors, one.kind, None)
        if kind is None or not issubclass(kind, errors.ZeroError):
            yield f"rank {rank} raised {one.kind}: {one.traceback}"


def problems_of_files(folder: Path) -> Iterator[str]:
    """Yield what is wrong with what is left: checkpoints, temporary files, processes."""
    for checkpoint in numbered(folder / "out", "checkpoint-"):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if why_torn(checkpoint) is None and hf_zero_command(["inspect", str(checkpoint), "--verify"]) != 0:
                yield f"{checkpoint.name} is damaged: {said.getvalue()}"
    pids = {int(path.name) for path in (folder / "processes").iterdir()}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[3]) in pids and fields[0] != "Z":  # the session, which is a rank's own
                yield f"a process is left: {status.with_name('cmdline').read_text()!r}"
    left = [path.name for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in pids)]
    left += [path.name for path in (folder / "tmp").iterdir()]
    if left:
        yield f"files are left: {left}"


def judge(case: Case) -> tuple[str, list[str]]:
    """Return how a case went, in two words, and what was wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = run(case, case.stage, folder)
        struck = (folder / "struck").exists()
        problems = [*problems_of_faults(case, ended, struck), *problems_of_files(folder)]
        how = "not struck" if not struck else "went on"
        if any(isinstance(one, RankFailure) for one in ended.outcomes):
            again = run(None, case.stage, folder)
            if any(one != unbroken(case.stage) for one in again.outcomes):
                problems.append(f"the restart is another run: {again.outcomes}, not {unbroken(case.stage)}")
            problems += problems_of_files(folder)
            how = "restarted"
        return how, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the cases (default 0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case alone")
    options = parser.parse_args()
    numbers = range(options.cases) if options.only is None else [options.only]
    counts, failed, began = collections.Counter[tuple[str, str]](), list[int](), time.monotonic()
    try:
        for stage in STAGES:
            unbroken(stage)
        for number in numbers:
            case = Case.draw(options.seed, number)
            how, problems = judge(case)
            counts[case.fault, how] += 1
            if problems:
                failed.append(number)
                print(f"FAILED {case}", *(text[-3000:] for text in problems), sep="\n  ", flush=True)
            else:
                print(f"{case.number}: {case.fault} in {case.place}, stage {case.stage}: {how}", flush=True)
    finally:
        ranks.close()
    print(*(f"{fault}: {how}: {count}" for (fault, how), count in sorted(counts.items())), sep="\n")
    took = time.monotonic() - began
    print(f"{len(numbers)} cases, seed {options.seed}: {len(failed)} failed {failed or ''} ({took:.0f} s)")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
