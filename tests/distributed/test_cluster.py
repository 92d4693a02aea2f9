"""Processes that srun or mpirun started find each other; a process that is alone is not taken for one of several."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hf_zero
from hf_zero.distributed.environment import described_processes, expand_hosts, slurm_port
from tests.harness.launches import bare_environment, write_script
from tests.harness.scripts import run_script

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[07-09,12]", ["gpu07", "gpu08", "gpu09", "gpu12"]),
        ("a[9-11]-ib,b", ["a9-ib", "a10-ib", "a11-ib", "b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_numbers_of_slurm_are_checked() -> None:
    """A value that is no number, or more hosts than there can be, is an error that names it, and takes no memory."""
    for text in ("n[1-999999999999]", "n[0-99999]x[0-99999]"):
        with pytest.raises(hf_zero.ConfigError, match="are more than 65536 hosts"):
            expand_hosts(text)
    tasks = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x99999999),4", "SLURM_NODEID": "99999998"}
    assert described_processes(tasks)["LOCAL_WORLD_SIZE"] == "2"
    assert described_processes({**tasks, "SLURM_NODEID": "99999999"})["LOCAL_WORLD_SIZE"] == "4"
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_NODEID"):
        with pytest.raises(hf_zero.ConfigError, match=f"{name}='x9': expected a number"):
            described_processes({**SLURM, name: "x9"})


@pytest.mark.parametrize("text", ["", "n[1-2", "n[a-b]", "n[]"])
def test_bad_lists_of_hosts(text: str) -> None:
    with pytest.raises(hf_zero.ConfigError, match="is no list of hosts such as"):
        expand_hosts(text)


def test_slurm() -> None:
    assert described_processes(SLURM) == {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(slurm_port(4711, 0)),
    }
    # Values that the job's script sets itself stay.
    given = {**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9901"}
    assert set(described_processes(given)) == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    ports = {slurm_port(job, step) for job in range(4700, 4800) for step in (0, 1)}
    assert len(ports) > 100 and all(1024 < port < 32768 for port in ports)
    assert described_processes({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3(x2)"})["LOCAL_WORLD_SIZE"] == "3"
    # All tasks on one host is no guess to make: where it is wrong, gloo would not look for the way to the others.
    assert "LOCAL_WORLD_SIZE" not in described_processes({**SLURM, "SLURM_STEP_TASKS_PER_NODE": ""})


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": None},  # the batch script, or a shell of salloc on the login node
        {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's interactive step
        {"SLURM_STEP_ID": "4294967291"},  # the batch step
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1 jupyter, inside a larger allocation
        {"SLURM_NTASKS": "1"},
        {"WORLD_SIZE": "2"},  # torchrun under srun
    ],
)
def test_what_is_no_task_of_several(change: dict[str, str | None]) -> None:
    environment = {name: value for name, value in {**SLURM, **change}.items() if value is not None}
    assert described_processes(environment) == {}


def test_mpi() -> None:
    alone = described_processes({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-x-1"})
    assert (alone["RANK"], alone["WORLD_SIZE"], alone["LOCAL_RANK"], alone["LOCAL_WORLD_SIZE"]) == ("1", "2", "1", "2")
    assert alone["MASTER_ADDR"] == "127.0.0.1" and 10_000 <= int(alone["MASTER_PORT"]) < 30_000
    assert described_processes(OPEN_MPI)["MASTER_PORT"] == "29500"
    spread = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(hf_zero.ConfigError, match=r"MASTER_ADDR is not set(.|\n)*mpirun -x MASTER_ADDR"):
        described_processes(spread)
    assert "MASTER_ADDR" not in described_processes({**spread, "MASTER_ADDR": "n1"})
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert described_processes(hydra)["WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**SLURM, "SLURM_NODELIST": ""}, "one of 6 tasks of a SLURM step, but SLURM_NODELIST is not set"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "a"}, "SLURM_PROCID, SLURM_LOCALID is not set"),
        ({"PMI_SIZE": "4"}, r"PMI_SIZE=4: (.|\n)*torchrun"),
    ],
)
def test_too_little_is_known(environment: dict[str, str], message: str) -> None:
    """Each of several processes would train a model of its own."""
    with pytest.raises(hf_zero.ConfigError, match=message):
        described_processes(environment)


TRAIN = """
    import json, os, sys, torch, hf_zero
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.full((1, 4), 1.0 + engine.rank)).square().mean())
    engine.step()
    facts = [engine.rank, engine.world_size, os.environ["LOCAL_RANK"], hf_zero.full_param(model.weight).tolist()]
    os.write(1, json.dumps(facts).encode())
"""

TRAINER = """
    import json, os, sys, torch, transformers, hf_zero
    transformers.set_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": [i, i + 1, i + 2], "labels": [i, i + 1, i + 2]} for i in range(8)]
    arguments = hf_zero.TrainingArguments(
        sys.argv[1], zero={"zero_optimization": {"stage": 2}}, per_device_train_batch_size=2, max_steps=2,
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True)
    trainer = hf_zero.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    weight = model.transformer.wte.weight.detach()
    facts = [arguments.process_index, arguments.world_size, os.environ["LOCAL_RANK"], weight.sum(1).tolist()]
    os.write(1, json.dumps(facts).encode())
"""


def run_as_tasks(script: Path, names: dict[str, str]) -> list[list[object]]:
    """Start `script` twice as srun and mpirun do: `names` says which variables hold a task's number."""
    tasks = []
    for rank in ("0", "1"):
        own = {name: value.replace("K", rank) for name, value in names.items()}
        environment = bare_environment(PYTHONPATH=str(Path(__file__).parents[2]), OMP_NUM_THREADS="1", **own)
        command = [sys.executable, str(script), str(script.parent / "out")]
        tasks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    facts = []
    for task in tasks:
        out, err = task.communicate(timeout=200)
        assert task.returncode == 0, err
        facts.append(json.loads(out[out.index("[") : out.rindex("]") + 1]))
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("text", [TRAIN, TRAINER], ids=["initialize", "Trainer"])
def test_two_tasks_of_srun(text: str, tmp_path: Path) -> None:
    names = {"SLURM_JOB_ID": "4712", "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    names |= {"SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}", "SLURM_NODELIST": "localhost"}
    script = write_script(tmp_path, text)
    tasks = run_script(script, tmp_path / "out", folder=tmp_path, instead=bare_environment(**names))
    assert tasks.status == [0, 0], tasks.err
    facts = [json.loads(out[out.index("[") : out.rindex("]") + 1]) for out in tasks.outs]
    assert [entry[:3] for entry in facts] == [[0, 2, "0"], [1, 2, "1"]]
    assert facts[0][3] == facts[1][3]


@pytest.mark.slow
def test_two_tasks_of_mpirun(tmp_path: Path) -> None:
    names = {"OMPI_COMM_WORLD_RANK": "K", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "test-of-hf-zero"}
    names |= {"OMPI_COMM_WORLD_LOCAL_RANK": "K", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    facts = run_as_tasks(write_script(tmp_path, TRAIN), names)
    assert [entry[:3] for entry in facts] == [[0, 2, "0"], [1, 2, "1"]]
    assert facts[0][3] == facts[1][3]


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK, MASTER_ADDR, MASTER_PORT is not set", "torchrun"]),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, ["MASTER_ADDR is not set"]),
        ({"WORLD_SIZE": "two"}, ["'two'", "number of processes"]),
    ],
)
@pytest.mark.parametrize("way", ["initialize", "arguments"])
def test_an_environment_that_is_half_set(
    way: str, given: dict[str, str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(hf_zero.ConfigError) as caught:
        if way == "initialize":
            hf_zero.initialize(model=torch.nn.Linear(2, 2), config={"zero_optimization": {"stage": 1}})
        else:
            hf_zero.TrainingArguments(str(tmp_path), zero={"zero_optimization": {"stage": 1}}, use_cpu=True)
    assert all(part in str(caught.value) for part in parts), caught.value
