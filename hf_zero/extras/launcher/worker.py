"""Stands before the script in each process: binds it to cores, sends its output to a file, becomes it, and keeps the
error that it ends with.

`python -m hf_zero.extras.launcher.worker '{"kind": "file", "cores": [0, 1], "log": "prefix"}' train.py ...`
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
from collections.abc import Sequence

from hf_zero.extras.launcher.failures import recorded
from hf_zero.extras.launcher.launch_errors import LaunchUsageError
from hf_zero.extras.launcher.script import become


def parse_cores(text: str) -> list[int]:
    """`1,3-5,7` as [1, 3, 4, 5, 7].

    Raises:
        LaunchUsageError: It is none of that, or names a core that this process may not use.
    """
    cores: list[int] = []
    most = cores_here()[-1]
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not re.fullmatch(r"\d{1,9}(-\d{1,9})?", part, re.ASCII) or (dash and int(last) < int(first)):
            raise LaunchUsageError(f"--bind_core_list {text}: {part!r} is not of the form 3 or 3-5")
        cores += range(int(first), min(int(last or first), max(int(first), most + 1)) + 1)
    missing = sorted(set(cores) - set(cores_here()))
    if missing:
        raise LaunchUsageError(f"--bind_core_list {text}: there is no core {missing[0]} to use on this host")
    return sorted(set(cores))


def cores_here() -> list[int]:
    """The cores that this process may use.

    Raises:
        LaunchUsageError: The system does not bind processes to cores.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise LaunchUsageError(
            f"--bind_cores_to_rank and --bind_core_list need Linux, and this is {platform.system()}: leave them out"
        )
    return sorted(os.sched_getaffinity(0))


def share(cores: Sequence[int], rank: int, count: int) -> list[int]:
    """The cores of one of `count` processes of a host: as many for each, those left over for nobody."""
    each = len(cores) // count
    return list(cores[rank * each : (rank + 1) * each])


def main(argv: Sequence[str]) -> None:
    options, script, arguments = json.loads(argv[0]), argv[1], argv[2:]
    rank, local_rank = os.environ["RANK"], int(os.environ["LOCAL_RANK"])
    if cores := options.get("cores"):
        own = share(cores, local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
        os.sched_setaffinity(0, own)
        os.environ["OMP_NUM_THREADS"] = str(len(own))
    if prefix := options.get("log"):
        log = os.open(f"{prefix}_rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # python -u writes each argument of print by itself, and the ranks share the output: their lines would mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    if os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
        from hf_zero.distributed.processes import prepare_to_be_joined

        prepare_to_be_joined()  # by the script, whoever makes its groups
    if options["kind"] != "program":
        with recorded(print_too=prefix is not None):
            become(script, arguments, is_module=options["kind"] == "module")
        return
    try:
        os.execvp(script, [script, *arguments])
    except OSError as error:
        sys.stderr.write(f"hf-zero launch: error: {script}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
