"""Runs launch lines and looks for what they left behind: `start` as a user does, in a process of their own, `launch`
without the imports of a fresh interpreter."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from tests.harness.scripts import run_hf_zero

# The transport only, as sshd does it: options and the host are dropped, the rest runs in a shell with a bare
# environment. Hosts called down-* refuse, hosts called slow-* never answer.
_SSH = """\
#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -o|-p) shift 2;; *) shift;; esac; done
host=$1; shift
[[ $host == down-* ]] && { echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255; }
[[ $host == slow-* ]] && exec sleep 60
exec env -i HOME="$HOME" PATH="$PATH" bash -c "$*"
"""
# The stand-in for pdsh: no standard input, one line prefixed by the host for each that comes, % signs are its own.
_PDSH = """\
#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -w) host=$2; shift 2;; *) shift;; esac; done
command=${*//%%/%}
env -i HOME="$HOME" PATH="$PATH" bash -c "$command" </dev/null | while read -r line; do echo "$host: $line"; done
exit "${PIPESTATUS[0]}"
"""
# The stand-in for srun: a process per node, in the environment of the caller.
_SRUN = """\
#!/bin/bash
while [[ $1 == -* ]]; do case $1 in
  --nodes) nodes=$2; shift 2;; --nodelist) list=$2; shift 2;; --*=*) shift;; *) shift 2;; esac; done
for ((node = 0; node < nodes; node++)); do
  SLURM_STEP_ID=0 SLURM_STEP_NODELIST=$list SLURM_NODEID=$node "$@" & pids+=($!)
done
trap 'kill "${pids[@]}"' TERM
status=0; for pid in "${pids[@]}"; do wait "$pid" || status=$?; done; exit $status
"""


def fake_transports(folder: Path) -> dict[str, str]:
    """`ssh`, `pdsh` and `srun` that run everything on this host; returns the PATH that finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("ssh", _SSH), ("pdsh", _PDSH), ("srun", _SRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@dataclass(frozen=True)
class Launched:
    status: int
    out: str
    err: str
    ended: float  # time.time() then


def bare_environment(**more: str) -> dict[str, str]:
    """Return the environment of a shell that knows nothing of any job, on a machine without a GPU."""
    return {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", **more}


def start(folder: Path, *arguments: object, **more: str) -> subprocess.Popen[str]:
    """Start `hf-zero launch ARGUMENTS` in `folder`; `more` is added to its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "hf_zero.extras.cli.main", "launch", *map(str, arguments)],
        cwd=folder,
        env=bare_environment(**{"PYTHONPATH": str(Path(__file__).parents[2]), **more}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job: subprocess.Popen[str], timeout: float = 120) -> Launched:
    try:
        out, err = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        job.terminate()
        out, err = job.communicate(timeout=60)
        raise AssertionError(f"the job did not end within {timeout} s:\n{out}\n{err}") from None
    return Launched(job.returncode, out, err, time.time())


def launch(folder: Path, *arguments: object, timeout: float = 120, **more: str) -> Launched:
    """Do what `start` and `finish` do, but the launcher is a forked process: the import of torch's agent costs more
    than most of these jobs. What it starts, on this host and on others, are the processes of a real launch.
    """
    environment = bare_environment(**{"PYTHONPATH": str(Path(__file__).parents[2]), **more})
    ran = run_hf_zero("launch", *arguments, folder=folder, instead=environment, timeout=timeout)
    return Launched(ran.status[0], ran.out, ran.err, time.time())


def write_script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def processes_naming(text: str) -> list[int]:
    """Return the ids of the processes whose command line holds `text`, this one excepted."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if text in line and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found
