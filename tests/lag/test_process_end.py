"""A process that ends while a thread of the device's autograd, or of an update, is at work ends with status 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]

# The thread of autograd gets the one processor only while the main thread sleeps: after Python's end has begun.
AFTER_BACKWARD = """
import os
import time
from pathlib import Path
import torch
from tests.lag import device, group
device.enable()
group.register()
import hf_zero

class Late:
    def __del__(self): time.sleep(0.5)

late = Late()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to("lag")
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
engine = hf_zero.initialize(model=model, config=config)[0]

def train():
    engine.backward(engine(torch.ones(1, 4, device="lag")).pow(2).mean())

train()
tasks = {int(task.name): (task / "comm").read_text() for task in Path("/proc/self/task").iterdir()}
threads = [task for task, name in tasks.items() if name.startswith("pt_autograd")]
assert threads
for thread in threads:
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
for task in tasks:
    os.sched_setaffinity(task, {min(os.sched_getaffinity(0))})
train()
print("end")
"""

IN_AN_UPDATE = """
import time
import torch
from hf_zero.optim.offload.update_worker import UpdateWorker

class Job:
    def run(self, look_ahead):
        one, other = torch.zeros(10_000_000), torch.zeros(10_000_000)
        for _ in range(200):
            one.copy_(other)
        print("job over")
    def prefetch(self): pass
    def fail(self, error): print(error)

class Late:
    def __del__(self): time.sleep(0.5)

late = Late()
worker = UpdateWorker(torch.device("cpu"))
worker.submit([Job(), Job()])
time.sleep(0.3)
"""


def _run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


def test_a_thread_of_autograd_has_freed_the_backward() -> None:
    ended = _run(AFTER_BACKWARD)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr


def test_an_update_under_way_is_waited_for() -> None:
    """The one behind it is not begun."""
    ended = _run(IN_AN_UPDATE)
    assert (ended.returncode, ended.stdout) == (0, "job over\n"), ended.stderr
