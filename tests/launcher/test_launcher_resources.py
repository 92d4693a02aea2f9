"""The launch line and its files mean what is tested here, without starting anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_zero.extras.launcher import forwarding, worker
from hf_zero.extras.launcher.hosts import Transport, srun_command
from hf_zero.extras.launcher.launch_errors import LaunchUsageError
from hf_zero.extras.launcher.launch_plan import JobPlan
from hf_zero.extras.launcher.resources import parse_hostfile, read_hostfile, select, trim

POOL = {"worker-0": 4, "worker-1": 4}
ALL = [0, 1, 2, 3]


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# our cluster\n\nworker-1 slots=2\n  worker-0\tslots=16 max_slots=16  # the old one\n")
    hosts = read_hostfile(path)
    assert hosts is not None and list(hosts.items()) == [("worker-1", 2), ("worker-0", 16)]
    assert read_hostfile(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker-0", "hostfile, line 1: 'worker-0' is not of the form"),
        ("worker-0 slots=4\nworker-1 slots=", "line 2: 'worker-1 slots='"),
        ("worker-0 slots=four", "is not of the form"),
        ("slots=4 worker-0", "is not of the form"),
        ("worker-0 slots=4 worker-1 slots=4", "is not of the form"),
        ("worker-0 slots=4\n\nworker-0 slots=2", "line 3: host worker-0 stands there twice"),
        ("worker-0 slots=0", "host worker-0 has no slots"),
        ("# nothing\n\n", "names no host"),
        ("-oProxyCommand=touch${IFS}pwned slots=2", "hostfile, line 1: '-oProxyCommand=.*' is no host"),
        ("a slots=1\n-w slots=1", "line 2: '-w' is no host: .* which does not begin with '-'"),
        ("me@-oX slots=1", "is no host"),
        ("ssh://a slots=1", "is no host"),
        ("exec:a slots=1", "is no host"),  # pdsh would run the command here
        ("^hosts slots=1", "is no host"),  # pdsh would read a file
        ("n[1-3] slots=1", "is no host"),  # pdsh and srun would go to three
        ("a,b slots=1", "is no host"),
        ("$(id) slots=1", "is no host"),
        ("a slots=999999999999", "line 1: 999999999999 is too much: a host has at most 4096 slots"),
        ("a slots=4097", "at most 4096"),
        (f"a slots={'9' * 5000}", "at most 4096"),
    ],
)
def test_bad_hostfiles(text: str, message: str) -> None:
    with pytest.raises(LaunchUsageError, match=message):
        parse_hostfile(text.splitlines())


@pytest.mark.parametrize("host", ["a", "gpu-07.x_y", "10.0.0.1", "fe80::1", "::1", "me@gpu-1"])
def test_hosts(host: str) -> None:
    assert parse_hostfile([f"{host} slots=4096"]) == {host: 4096}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", {"worker-0": ALL, "worker-1": ALL}),
        ("worker-1", "", {"worker-1": ALL}),
        ("worker-1:2,0@worker-0", "", {"worker-0": ALL, "worker-1": [0, 2]}),  # the hostfile's order
        ("worker-0:0@worker-0:1,1", "", {"worker-0": [0, 1]}),
        ("", "worker-1", {"worker-0": ALL}),
        ("", "worker-1:0", {"worker-0": ALL, "worker-1": [1, 2, 3]}),
        ("", "worker-0:0,1,2,3@worker-1:3", {"worker-1": [0, 1, 2]}),
    ],
)
def test_include_and_exclude(include: str, exclude: str, expected: dict[str, list[int]]) -> None:
    chosen = select(POOL, include, exclude)
    assert chosen == expected and list(chosen) == list(expected)


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("worker-0", "worker-1", "exclude each other"),
        ("worker-2", "", "there is no host worker-2; there is worker-0, worker-1"),
        ("worker-0:4", "", "host worker-0 has no slot 4; its slots are 0 to 3"),
        ("", "worker-1:1,7", "host worker-1 has no slot 7"),
        ("worker-0:", "", "is not of the form"),
        ("worker-0:a", "", "is not of the form"),
        ("worker-0@@worker-1", "", "is not of the form"),
        ("worker-0:999999999999", "", "--include worker-0:9*: 9* is too much: a host has at most 4096 slots"),
        ("", f"worker-0:{'9' * 5000}", "at most 4096"),
        ("", "worker-0@worker-1", "leaves no slot"),
    ],
)
def test_bad_include_and_exclude(include: str, exclude: str, message: str) -> None:
    with pytest.raises(LaunchUsageError, match=message):
        select(POOL, include, exclude)


def test_numbers_of_nodes_and_gpus() -> None:
    slots = select(POOL)
    assert trim(slots, None, None) == slots
    assert trim(slots, 1, 2) == {"worker-0": [0, 1]}
    assert trim(slots, 2, 4) == slots
    for nodes, gpus, message in (
        (3, None, "--num_nodes 3, but the hosts are worker-0, worker-1"),
        (0, None, "--num_nodes 0: give 1 or more"),
        (None, 5, "--num_gpus 5, but host worker-0 has 4"),
        (None, -2, "--num_gpus -2: give 1 or more"),
    ):
        with pytest.raises(LaunchUsageError, match=message):
            trim(slots, nodes, gpus)


def test_environment_that_goes_along() -> None:
    environment = {"NCCL_DEBUG": "INFO", "PYTHONHASHSEED": "0", "UCX_TLS": "tcp", "HF_TOKEN": "secret", "PATH": "/bin"}
    chosen = forwarding.exported(environment, "/work dir")
    assert chosen == {"NCCL_DEBUG": "INFO", "PYTHONHASHSEED": "0", "UCX_TLS": "tcp", "PYTHONPATH": "/work dir"}
    cluster = {"AISC_JOB_NAME": "j", "NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "WARN", "PYTHONPATH": "/x"}
    assert forwarding.exported(cluster, "/w") == {"NCCL_DEBUG": "WARN", "PYTHONPATH": f"/w{os.pathsep}/x"}


def test_environment_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.chdir(here)
    (home / ".deepspeed_env").write_text("A=1\n\n# a comment\nexport B = two words\n")
    (here / ".hf_zero_env").write_text('C="x=$HOME"\n')
    paths = forwarding.environment_files()
    assert [path.resolve() for path in paths] == [home / ".deepspeed_env", here / ".hf_zero_env"]
    assert forwarding.read_environment_file(paths[0]) == {"A": "1", "B": "two words"}
    assert forwarding.read_environment_file(paths[1]) == {"C": "x=$HOME"}
    monkeypatch.setenv("DS_ENV_FILE", "mine")
    (here / "mine").write_text("no value\n")
    assert [path.name for path in forwarding.environment_files()] == ["mine", ".hf_zero_env"]
    with pytest.raises(LaunchUsageError, match="mine, line 1: 'no value' is not of the form NAME=VALUE"):
        forwarding.read_environment_file(here / "mine")
    text = forwarding.shell_exports({"A": "$x 'y'", "B": "overruled"}, {"B": '$HOME "z"'})
    assert os.popen(f'{text} printf \'%s|%s\' "$A" "$B"').read() == f"$x 'y'|{home} \"z\""


def test_values_of_environment_files_run_nothing(tmp_path: Path) -> None:
    """The shell of the other host expands $NAME and ${NAME}; all else comes through as it stands in the file."""
    marker = tmp_path / "ran"
    values = ["$", "5$"]
    values += [f"$(touch {marker})", f"${{X:-$(touch {marker})}}", f"`touch {marker}`", f'";touch {marker};"']
    for value in values:
        line = forwarding.shell_exports({}, {"A": value, "B": "${HOME}/x"}) + 'printf \'%s|%s\' "$A" "$B"'
        assert os.popen(line).read() == f"{value}|{os.environ['HOME']}/x"
    assert not marker.exists()
    names = {"NCCL_X": "1", "NCCL_X;touch y": "1", "PYTHON\N{LATIN SMALL LETTER E WITH ACUTE}": "1"}
    assert {*forwarding.exported(names, "/w")} == {"NCCL_X", "PYTHONPATH"}
    for content, message in ((b"A=\xff\n", "is no text in UTF-8"), (b"A=a\0b\n", "line 1")):
        (tmp_path / "env").write_bytes(content)
        with pytest.raises(LaunchUsageError, match=message):
            forwarding.read_environment_file(tmp_path / "env")


def test_cores_are_shared_out() -> None:
    cores = sorted(os.sched_getaffinity(0))
    text = ",".join(map(str, cores))
    assert worker.parse_cores(text) == cores
    assert worker.parse_cores(f"{cores[0]}-{cores[0]}") == cores[:1]
    for bad in ("", "1-", "3-1", "x", f"{max(cores) + 1}", "0-999999999", "9" * 5000):
        with pytest.raises(LaunchUsageError, match="--bind_core_list"):
            worker.parse_cores(bad)
    assert [worker.share([0, 1, 2, 3, 8], rank, 2) for rank in (0, 1)] == [[0, 1], [2, 3]]


def test_commands_for_other_hosts() -> None:
    assert Transport("ssh", 2222, ("-v",)).command("a", "run 50%")[-5:] == ["2222", "-v", "--", "a", "run 50%"]
    pdsh = Transport("pdsh", 2222, ("-u", "5"))
    assert pdsh.command("a", "run 50%") == ["pdsh", "-S", "-u", "5", "-w", "a", "--", "run 50%%"]
    assert pdsh.environment()["PDSH_RCMD_TYPE"] == "ssh"
    assert pdsh.environment()["PDSH_SSH_ARGS_APPEND"].endswith("-p 2222")
    plan = JobPlan((("0", "1"), ("0", "1")), "", 29500, "train.py", ("--x",))
    assert JobPlan.decode(plan.encode()) == plan
    line = " ".join(srun_command(plan, ["n1", "n2"], ["--mem", "0"]))
    assert line.startswith(
        "srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit=1 --nodelist n1,n2 --mem 0 "
    )
    assert line.endswith(f" -m hf_zero.extras.launcher.node {plan.encode()} slurm")
    for devices in ((("0", "1"), ("0",)), (("1", "2"), ("1", "2"))):
        with pytest.raises(LaunchUsageError, match="same first slots on every host"):
            srun_command(JobPlan(devices, "", 29500, "train.py"), ["n1", "n2"], [])
