"""Ranks on several hosts, network namespaces of scripts/hosts.sh, whose names lead to 127.0.1.1 as on Debian."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import os, torch, hf_zero
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
engine = hf_zero.initialize(model=model, config=config)[0]
engine.backward(engine(torch.full((1, 4), engine.rank + 1.0)).sum())
engine.step()
weight = engine.full_state_dict(keep=True)["weight"]
if engine.rank == 0:
    torch.manual_seed(0)
    moved = torch.nn.Linear(4, 1).weight.detach() - weight
    print(os.environ["GLOO_SOCKET_IFNAME"], moved.flatten().tolist())
"""

ARGUMENTS = """
import os
from hf_zero import TrainingArguments

args = TrainingArguments("out", zero={"zero_optimization": {"stage": 2}}, use_cpu=True)
print(os.environ["GLOO_SOCKET_IFNAME"], args.world_size)
"""
TORCHRUN = "torchrun --nnodes 2 --nproc_per_node 1 --node_rank {rank} --master_addr {master}".split()
# Runs what follows where each host has a second interface, from which no way leads to the other host.
ETH1 = "ip link add eth1 type veth peer name eth2 && ip addr add 192.168.9.$(({rank} + 1))/24 dev eth1"
WITH_ETH1 = ("bash", "-c", f'{ETH1} && ip link set eth1 up && ip link set eth2 up && exec "$@"', "bash")

UNTIL_CUT_OFF = """
import torch, hf_zero
from hf_zero.distributed.timeouts import TIMEOUTS

TIMEOUTS.unreachable = 4
model = torch.nn.Linear(4, 1)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
engine = hf_zero.initialize(model=model, config=config)[0]
for step in range(1 << 30):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    if step == 10 and engine.rank == 0:
        print("ten steps", flush=True)
"""


def _why_not() -> str:
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    name = f"hz-try-{os.getpid()}"
    make = f"ip netns add {name} && ip -n {name} link add eth0 type veth peer name eth1 && unshare --uts --fork true"
    line = f"{make}; made=$?; ip netns del {name}; exit $made"
    tried = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    return f"network namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


_REASON = _why_not()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON)


def _line(*command: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line that runs `command` on two hosts, and its environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    return [str(ROOT / "scripts" / "hosts.sh"), "2", "none", "0", *command], environment


def _run(tmp_path: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("host0 slots=1\nhost1 slots=1\n")
    line, environment = _line(*command, **variables)
    return subprocess.run(
        line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.parametrize(
    "launch",
    [
        " ".join(TORCHRUN),
        "torchrun --nnodes 2 --nproc_per_node 1 --node_rank {rank} --rdzv_backend c10d --rdzv_endpoint host0:29400",
        "hf-zero launch --hostfile hosts --no_ssh --node_rank {rank} --master_addr host0",
        "env RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=host0 MASTER_PORT=29500 python",
    ],
)
def test_hosts_find_each_other(tmp_path: Path, launch: str) -> None:
    ended = _run(tmp_path, *launch.split(), "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    moved = next(line for line in ended.stdout.splitlines() if line.startswith("eth0 ")).removeprefix("eth0 ")
    assert json.loads(moved) == pytest.approx([0.15] * 4)  # the mean of 1 and 2, times the rate


def test_tasks_of_slurm_whose_group_accelerate_makes(tmp_path: Path) -> None:
    (tmp_path / "arguments.py").write_text(ARGUMENTS)
    step = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=host[0-1]"
    ended = _run(tmp_path, "env", *step.split(), "SLURM_PROCID={rank}", "python", "arguments.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "eth0 2" in ended.stdout


def test_an_interface_that_does_not_exist(tmp_path: Path) -> None:
    ended = _run(tmp_path, *TORCHRUN, "train.py", GLOO_SOCKET_IFNAME="eth9")
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    for rank in range(2):
        lacks = f"GLOO_SOCKET_IFNAME=eth9, but host{rank} has no interface 'eth9' with an address: it has lo ("
        assert f"rank {rank}: {lacks}" in said


@pytest.mark.parametrize("interface", ["lo", "eth1"])
def test_an_interface_that_leads_nowhere(tmp_path: Path, interface: str) -> None:
    ended = _run(tmp_path, *WITH_ETH1, *TORCHRUN, "train.py", GLOO_SOCKET_IFNAME=interface)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    addresses = {"lo": ("127.0.0.1", "127.0.0.1"), "eth1": ("192.168.9.1", "192.168.9.2")}[interface]
    for rank, other in ((0, 1), (1, 0)):
        here = f"rank {rank} on host{rank} ({interface}, {addresses[rank]})"
        assert f"{here} cannot connect to rank {other} on host{other} ({addresses[other]}): " in said, said
    assert "Set GLOO_SOCKET_IFNAME on each host to the interface that they share" in said


def test_an_interface_that_leads_nowhere_is_not_chosen(tmp_path: Path) -> None:
    ended = _run(tmp_path, *WITH_ETH1, *TORCHRUN, "train.py")
    assert ended.returncode == 0 and "eth0 [" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.slow
def test_every_rank_ends_where_a_host_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNTIL_CUT_OFF)
    variables = "RANK={rank} WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=host0 MASTER_PORT=29500"
    line, environment = _line("env", *variables.split(), "python", "train.py")
    pipe = subprocess.PIPE
    with subprocess.Popen(line, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True) as job:
        try:
            assert job.stdout is not None
            assert any("ten steps" in said for said in job.stdout)
            switch = f"hz{job.pid}-switch"
            subprocess.run(["ip", "-n", switch, "link", "set", "port1", "down"], check=True, timeout=30)
            said = "".join(job.communicate(timeout=60))
        finally:
            job.terminate()
    assert job.returncode != 0
    for rank, other in ((0, 1), (1, 0)):
        assert f"DivergenceError: rank {rank} of 2: " in said, said
        assert f"rank(s) [{other}] on host{other} have ended, or closed their connections after an error" in said
