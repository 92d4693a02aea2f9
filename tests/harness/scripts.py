"""Runs scripts on the ranks of a job, as `torchrun` would, without its agents and fresh interpreters.

A rank of the fork server becomes the script: its arguments, its folder, `__main__`. It has what the script imports
already, which is five seconds of processor time per rank for a Trainer. What a launcher itself does (`tests.harness.
launches`) is not tested by this.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers  # noqa: F401  (so that the fork server imports what goes with it)

from tests.harness.ranks import run_ranks


@dataclasses.dataclass(frozen=True)
class Ran:
    """A script left this: per rank its exit status, and what it wrote."""

    status: list[int]
    outs: list[str]
    errs: list[str]

    @property
    def out(self) -> str:
        return "".join(self.outs)

    @property
    def err(self) -> str:
        return "".join(self.errs)


def run_script(
    script: Path,
    *arguments: object,
    folder: Path,
    processes: int = 2,
    timeout: float = 120,
    instead: Mapping[str, str] | None = None,
    as_deepspeed: bool = False,
    **environment: str,
) -> Ran:
    """Run `script ARGUMENTS` in `folder` on ranks that see what torchrun sets, and `environment`.

    `{rank}` in an argument or in a value of `instead` is the number of the process.

    Args:
        instead: The whole environment, instead of that.
        as_deepspeed: See `run_ranks`.
    """
    argv = [str(script), *map(str, arguments)]
    env = {"HF_HUB_OFFLINE": "1", **environment}
    job = become, processes, argv, str(folder), instead
    results = run_ranks(*job, init_group=False, timeout=timeout, env=env, as_deepspeed=as_deepspeed)
    return Ran(*([result[number] for result in results] for number in range(3)))


def run_hf_zero(*arguments: object, folder: Path, processes: int = 1, **more: Any) -> Ran:
    """Run `hf-zero ARGUMENTS` in `folder`, as the installed command does."""
    script = folder / "hf-zero"
    script.write_text("import sys\nfrom hf_zero.extras.cli.main import main\nsys.exit(main())\n")
    return run_script(script, *arguments, folder=folder, processes=processes, **more)


def become(argv: list[str], folder: str, instead: Mapping[str, str] | None) -> tuple[int, str, str]:
    """Run in the process of a rank, and return its status, standard output and standard error."""
    os.chdir(folder)
    rank = os.environ["RANK"]
    if instead is not None:
        os.environ.clear()
        os.environ.update({name: value.replace("{rank}", rank) for name, value in instead.items()})
    paths = [Path(folder) / f".out-{rank}", Path(folder) / f".err-{rank}"]
    sys.argv = [argv[0], *(argument.replace("{rank}", rank) for argument in argv[1:])]
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    for number, path in enumerate(paths, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    try:
        runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()  # a rank of the fork server ends without them
    sys.stdout.flush()
    sys.stderr.flush()
    out, err = (path.read_text(errors="replace") for path in paths)
    for path in paths:
        path.unlink()
    return status, out, err
