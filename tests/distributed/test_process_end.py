"""Processes end with their own status, whatever their native threads are at. See process_ends.py for whole jobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]

# gloo's thread frees a tensor, and with it an object of Python that takes its time; the script keeps the group.
FREED_BY_GLOO = """
import os
import sys
import tempfile
import threading
import time
import torch
import torch.distributed as dist
{imports}

class Late:
    def __del__(self):
        freeing.set()
        end = time.monotonic() + 0.5
        while time.monotonic() < end: pass
        print("freed")

freeing = threading.Event()
path = os.path.join(tempfile.mkdtemp(), "store")
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
group = dist.group.WORLD
if rank == 1:
    time.sleep(0.3)
    dist.all_reduce(torch.ones(1))
    os._exit(0)
tensor = torch.ones(1)
tensor.late = Late()
dist.all_reduce(tensor, async_op=True)
del tensor
freeing.wait()
dist.destroy_process_group()
"""

IN_A_CALL = """
import threading
import time
import torch
{imports}

def copy():
    one, other = torch.zeros(10_000_000), torch.zeros(10_000_000)
    while True:
        one.copy_(other)

threading.Thread(target=copy, daemon=True).start()
time.sleep(0.3)
"""

# torch makes defaults of the default group, of functions that are imported while there is one.
KEPT_BY_DEFAULTS = """
import os
import weakref
from pathlib import Path
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed.nn.functional
import hf_zero.distributed.processes
dist.destroy_process_group()
print(*sorted((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()))
"""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=_REPOSITORY, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize(("script", "said"), [(FREED_BY_GLOO, "freed\n"), (IN_A_CALL, "")], ids=["gloo", "own"])
def test_a_thread_that_needs_python_late_does_not_abort_the_process(script: str, said: str) -> None:
    ended = _run("-c", script.format(imports="import hf_zero.distributed.process_end"))
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr
    without = _run("-c", script.format(imports=""))
    assert without.returncode != 0, "torch's threads do not need Python any more: this file and its subject can go"


def test_functions_of_torch_do_not_keep_the_default_group() -> None:
    ended = _run("-c", KEPT_BY_DEFAULTS)
    assert (ended.returncode, ended.stdout) == (0, "python\n"), ended.stderr


def test_ways_to_end() -> None:
    """Each is a job of two ranks; tests/nightly/test_process_end.py has all ways."""
    ways = ("keep", "exception on one", "interrupt")
    ended = _run("-m", "tests.distributed.process_ends", str(len(ways)), *ways)
    assert ended.returncode == 0, ended.stdout + ended.stderr
