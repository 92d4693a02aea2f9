"""`hf-zero launch`: the processes it starts, what they are told, and that all of them end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hf_zero.distributed.environment import slurm_port
from hf_zero.extras.cli.main import main
from hf_zero.extras.launcher import hosts
from hf_zero.extras.launcher.failures import recorded, show_failure
from hf_zero.extras.launcher.launch_plan import JobPlan
from hf_zero.extras.launcher.node import free_port
from hf_zero.extras.launcher.script import takes_local_rank
from tests.harness.launches import (
    bare_environment,
    fake_transports,
    finish,
    launch,
    processes_naming,
    start,
    write_script,
)

TELL = """
    import argparse, json, os, sys, time
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--fail", type=int)
    parser.add_argument("--hang", action="store_true")
    args, rest = parser.parse_known_args()
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS".split()
    names += ["NCCL_TEST", "FROM_FILE", "HF_TOKEN", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
    facts = {name: os.environ.get(name) for name in names}
    facts |= {"local_rank": args.local_rank, "rest": rest, "cwd": os.getcwd()}
    facts["at"] = time.time()
    facts["cores"] = sorted(os.sched_getaffinity(0))
    os.write(1, (json.dumps(facts) + "\\n").encode())
    if args.fail == int(os.environ["RANK"]):
        sys.exit(3)
    if args.hang or args.fail is not None:
        time.sleep(300)
"""


def facts_of(text: str) -> list[dict[str, object]]:
    """Return what each rank printed, by rank."""
    facts = [json.loads(line[line.index("{") :]) for line in text.splitlines() if "{" in line]
    return sorted(facts, key=lambda entry: int(entry["RANK"]))


def wait_for_ranks(marker: str, count: int) -> None:
    """Return when so many processes of the job run."""
    deadline = time.monotonic() + 60
    while len(processes_naming(marker)) < count:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)


def assert_none_left(marker: str) -> None:
    deadline = time.monotonic() + 5
    while left := processes_naming(marker):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.05)


def test_processes_on_this_host(tmp_path: Path) -> None:
    write_script(tmp_path, TELL)
    job = launch(tmp_path, "--num_gpus=2", "train.py", "--zero", "a b.json", "$$x", "${local_rank}", "--num_gpus", "7")
    assert job.status == 0, job.err
    facts = facts_of(job.out)
    assert [entry["RANK"] for entry in facts] == ["0", "1"]
    for rank, entry in enumerate(facts):
        assert entry["local_rank"] == rank and entry["LOCAL_RANK"] == str(rank)
        assert entry["WORLD_SIZE"] == entry["LOCAL_WORLD_SIZE"] == entry["LOCAL_SIZE"] == "2"
        assert entry["rest"] == ["--zero", "a b.json", "$$x", "${local_rank}", "--num_gpus", "7"]
        assert entry["MASTER_ADDR"] == "127.0.0.1"
        assert entry["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert job.err.count("\n") == 1 and "2 processes on this host (CPU), rank 0 at 127.0.0.1:" in job.err


def test_lines_of_ranks_do_not_mix(tmp_path: Path) -> None:
    """Each line is whole, and none waits for the script's end: the last act of a rank is not Python's."""
    write_script(
        tmp_path,
        """
        import os, pathlib, time
        pathlib.Path("ready" + os.environ["RANK"]).touch()
        while len(list(pathlib.Path().glob("ready*"))) < 4:
            time.sleep(0.01)
        for number in range(500):
            print(os.environ["RANK"], number, "x" * 100)
        os._exit(0)
        """,
    )
    job = launch(tmp_path, "--num_gpus", 4, "train.py")
    assert job.status == 0, job.err
    wanted = [f"{rank} {number} {'x' * 100}" for rank in range(4) for number in range(500)]
    assert sorted(job.out.splitlines()) == sorted(wanted)


@pytest.mark.slow
def test_modules_programs_logs_and_cores(tmp_path: Path) -> None:
    write_script(tmp_path, TELL, "told.py")
    job = launch(tmp_path, "--no_local_rank", "--quiet", "--module", "told", PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    assert job.status == 0 and job.err == ""
    assert [entry["local_rank"] for entry in facts_of(job.out)] == [None]
    cores = sorted(os.sched_getaffinity(0))
    line = ["--num_gpus", 2, "--bind_cores_to_rank", "--enable_each_rank_log", "logs", "told.py", "$$1"]
    job = launch(tmp_path, *line)
    assert job.status == 0 and job.out == ""
    each = len(cores) // 2
    for rank in (0, 1):
        (log,) = (tmp_path / "logs").glob(f"*_rank{rank}.log")
        (entry,) = facts_of(log.read_text())
        assert entry["cores"] == cores[rank * each : (rank + 1) * each] and entry["OMP_NUM_THREADS"] == str(each)
        assert entry["local_rank"] == rank and entry["rest"] == ["$$1"]
    program = write_script(tmp_path, "#!/bin/sh\necho $RANK of $WORLD_SIZE: $*\n", "run.sh")
    program.chmod(0o755)
    job = launch(tmp_path, "--num_gpus", 2, "--no_python", "./run.sh", "x")
    assert sorted(job.out.splitlines()) == ["0 of 2: x", "1 of 2: x"]
    job = launch(tmp_path, "--num_gpus", 2, "--no_python", "--pass_local_rank", "./run.sh", "x")
    assert sorted(job.out.splitlines()) == ["0 of 2: --local_rank=0 x", "1 of 2: --local_rank=1 x"]


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    script = write_script(tmp_path, TELL)
    job = launch(tmp_path, "--num_gpus", 2, script, "--fail", 1)
    assert job.status == 1
    assert job.ended - float(str(facts_of(job.out)[1]["at"])) < 10
    last = job.err.splitlines()[-1]
    assert last.startswith("hf-zero launch: error: rank 1 failed on ") and "(exit status 3)" in last
    assert "Traceback" not in job.err
    assert_none_left(str(script))


PLAIN = """
    import argparse, os
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])  # read, and no option
    if args.fail == "mine":
        raise ValueError("a mistake of my own")
    if args.fail == "config":
        import hf_zero
        hf_zero.ZeroConfig.load({"zero_optimisation": {"stage": 3}})
"""


def test_a_script_without_the_option_gets_no_local_rank(tmp_path: Path) -> None:
    write_script(tmp_path, PLAIN, "plain.py")
    job = launch(tmp_path, "--num_gpus", 2, "plain.py")
    assert (job.status, job.out) == (0, ""), job.err
    job = launch(tmp_path, "--pass_local_rank", "plain.py")
    last = job.err.splitlines()[-1]
    assert job.status == 1 and "(exit status 2)" in last and "write --no_local_rank before" in last
    job = launch(tmp_path, "plain.py", "--zero", "zero3.json")
    assert job.err.splitlines()[-1].endswith("write --module hf_zero.run --zero FILE before the script")


@pytest.mark.parametrize(
    ("script", "kind", "takes"),
    [
        ('add_argument("--local_rank", type=int)', "file", True),
        ("@click.option('--local-rank')", "file", True),
        ("@dataclass\nclass Arguments:\n    local_rank: int = -1", "file", True),
        ('local_rank = int(os.environ["LOCAL_RANK"])\nif local_rank: pass', "file", False),
        ("add_argument('--local_rank')", "module", True),
        ("add_argument('--local_rank')", "program", True),
    ],
)
def test_who_takes_local_rank(
    script: str, kind: str, takes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine", "train.py").write_text(script)
    Path("mine", "__main__.py").write_text(script)
    assert takes_local_rank("mine.train" if kind == "module" else "mine/train.py", kind) is takes
    assert takes_local_rank("mine" if kind == "module" else "mine/none.py", kind) is (kind == "module")


@pytest.mark.parametrize("kind", ["mine", "config"])
def test_one_error_is_shown_and_all_are_kept(kind: str, tmp_path: Path) -> None:
    write_script(tmp_path, PLAIN, "plain.py")
    job = launch(tmp_path, "--num_gpus", 2, "--quiet", "plain.py", "--fail", kind)
    *shown, last = job.err.splitlines()
    kept = Path(last.rpartition(" ")[2])
    tracebacks = kept.read_text()
    kept.unlink()
    assert job.status == 1 and "launcher" not in tracebacks
    if kind == "config":
        assert shown[0] == "ConfigError: 1 problem in the ZeRO configuration (a dict):" and len(shown) == 3
        assert "(ConfigError)" in last and 'File "plain.py"' in tracebacks
    else:
        assert shown[0].startswith("Traceback") and shown[-1] == "ValueError: a mistake of my own"
        assert sum(line.startswith("ValueError") for line in shown) == 1 and "(ValueError)" in last


@pytest.mark.parametrize("exitcode", [-signal.SIGKILL, 3])
def test_a_rank_that_ended_without_a_word_came_first(
    exitcode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The errors of the ranks that miss it are in the file; the agent ends them by SIGTERM."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.raises(SystemExit), recorded(print_too=False):
        raise RuntimeError("the other one is gone")
    failures = {
        0: ProcessFailure(0, 11, -signal.SIGTERM, str(tmp_path / "error.json")),
        1: ProcessFailure(1, 12, exitcode, str(tmp_path / "none.json")),
        2: ProcessFailure(2, 13, -signal.SIGTERM, str(tmp_path / "none.json")),
    }
    line = show_failure(failures, [], pass_local_rank=False)
    kept = Path(line.rpartition(" ")[2])
    assert capsys.readouterr().err == "" and line.startswith("rank 1 failed on ")
    assert ("(killed by SIGKILL)" if exitcode < 0 else "(exit status 3)") in line
    assert "RuntimeError: the other one is gone" in kept.read_text() and "rank(s) 0:" in line
    kept.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_processes(number: signal.Signals, tmp_path: Path) -> None:
    script = write_script(tmp_path, TELL)
    job = start(tmp_path, "--num_gpus", 2, "--save_pid", script, "--hang")
    wait_for_ranks(f"{script} --local_rank", 2)
    assert Path(f"/tmp/{job.pid}.hf_zero").read_text() == str(job.pid)
    job.send_signal(number)
    done = finish(job, 20)
    assert done.status == 1
    assert done.err.splitlines()[-1] == f"hf-zero launch: error: stopped by {number.name}; all processes were ended"
    assert_none_left(str(script))
    assert not Path(f"/tmp/{job.pid}.hf_zero").exists()


STOPPED_EARLY = """
    import signal, subprocess, sys
    import torch.distributed.launcher.api as api
    from torch.distributed.elastic.multiprocessing import SignalException
    from hf_zero.extras.launcher import node
    from hf_zero.extras.launcher.launch_plan import JobPlan

    def start_and_be_stopped(config, program):
        def run(*arguments):
            global rank
            rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            raise SignalException("stopped", signal.SIGTERM)
        return run

    api.elastic_launch = start_and_be_stopped
    try:
        node._run_agent(JobPlan((("0",),), "127.0.0.1", 29500, (sys.executable,), 1), 0, [sys.executable])
    except node.LaunchFailed as error:
        print(error, rank.wait(10))
"""


@pytest.mark.slow
def test_a_signal_while_processes_start_leaves_none(tmp_path: Path) -> None:
    """torch's agent knows its processes once all are started: a signal before that left them running."""
    line = [sys.executable, str(write_script(tmp_path, STOPPED_EARLY))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.stdout == "stopped by SIGTERM; all processes were ended -9\n", done.stderr


def two_hosts(folder: Path, names: str = "host-a host-b") -> Path:
    first, second = names.split()
    path = folder / "hosts"
    path.write_text(f"{first} slots=1\n{second} slots=2\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ssh", "pdsh", "slurm"])
def test_two_agents_meet(launcher: str, tmp_path: Path) -> None:
    two_hosts(tmp_path)
    write_script(tmp_path, TELL)
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=in $HOME\n")
    more = {**fake_transports(tmp_path / "bin"), "NCCL_TEST": "it's", "HF_TOKEN": "secret"}
    line: list[object] = ["--hostfile", "hosts", "--launcher", launcher, "--master_port", free_port()]
    line += ["--master_addr", "127.0.0.1"] if launcher != "ssh" else []
    line += ["--exclude", "host-b:1"] if launcher == "slurm" else []
    job = launch(tmp_path, *line, "train.py", "a 'b'", **more)
    assert job.status == 0, job.err
    facts = facts_of(job.out)
    where = [(entry["CROSS_RANK"], entry["LOCAL_RANK"], entry["local_rank"]) for entry in facts]
    assert where == [("0", "0", 0), ("1", "0", 0), ("1", "1", 1)][: len(facts)]
    assert len(facts) == (2 if launcher == "slurm" else 3)
    assert len({(entry["MASTER_ADDR"], entry["MASTER_PORT"]) for entry in facts}) == 1
    for entry in facts:
        assert entry["WORLD_SIZE"] == str(len(facts)) and entry["CROSS_SIZE"] == "2"
        assert entry["NCCL_TEST"] == "it's" and entry["FROM_FILE"] == f"in {os.environ['HOME']}"
        assert entry["HF_TOKEN"] == (None if launcher != "slurm" else "secret")  # srun hands all on
        assert entry["rest"] == ["a 'b'"] and entry["cwd"] == str(tmp_path)


@pytest.mark.slow
def test_recipe_for_slurm(tmp_path: Path) -> None:
    """The batch script in an allocation of two nodes without GPUs."""
    write_script(tmp_path, TELL)
    recipe = Path(__file__).parents[2] / "recipes" / "slurm" / "train.sbatch"
    path = fake_transports(tmp_path / "bin")["PATH"]
    allocation = {"SLURM_JOB_ID": "4713", "SLURM_JOB_NODELIST": "localhost,127.0.0.1", "PROCESSES_PER_NODE": "2"}
    done = subprocess.run(
        ["bash", str(recipe), "train.py", "--zero", "zero3.json"],
        cwd=tmp_path,
        env=bare_environment(**{**allocation, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{path}"}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    facts = facts_of(done.stdout)
    assert [(entry["CROSS_RANK"], entry["local_rank"]) for entry in facts] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert {entry["MASTER_ADDR"] for entry in facts} == {"localhost"}
    assert {entry["MASTER_PORT"] for entry in facts} == {str(slurm_port(4713, 0))}
    assert facts[3]["rest"] == ["--zero", "zero3.json"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])  # with slurm it is srun that ends the others
def test_one_host_that_fails_ends_the_others(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("host-a slots=1\nhost-b slots=1\n")
    script = write_script(tmp_path, TELL)
    line = ["--hostfile", "hosts", "--launcher", launcher, "--master_addr", "127.0.0.1", "--master_port", free_port()]
    job = launch(tmp_path, *line, script, "--fail", 1, **fake_transports(tmp_path / "bin"), timeout=60)
    assert job.status == 1
    assert job.ended - float(str(facts_of(job.out)[1]["at"])) < 10
    assert "rank 1 failed on" in job.err
    assert job.err.splitlines()[-1].startswith("hf-zero launch: error: host host-b ended with status 1")
    assert_none_left(str(script))


@pytest.mark.slow
def test_agents_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    two_hosts(tmp_path)
    script = write_script(tmp_path, TELL)
    more = fake_transports(tmp_path / "bin")
    job = start(tmp_path, "--hostfile", "hosts", "--master_port", free_port(), script, "--hang", **more)
    wait_for_ranks(f"{script} --local_rank", 3)
    job.kill()
    job.wait()
    assert_none_left(str(script))


@pytest.mark.slow
def test_each_host_by_itself(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("host-a slots=1\nhost-b slots=1\n")
    write_script(tmp_path, TELL)
    line = ["-H", "hosts", "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", free_port()]
    jobs = [start(tmp_path, *line, "--node_rank", rank, "train.py") for rank in (1, 0)]
    done = [finish(job) for job in jobs]
    assert [job.status for job in done] == [0, 0], done
    assert [entry["CROSS_RANK"] for entry in facts_of(done[1].out + done[0].out)] == ["0", "1"]


def usage_error(capsys: pytest.CaptureFixture[str], line: str) -> str:
    try:
        status = main(["launch", *line.split()])
    except SystemExit as left:
        assert isinstance(left.code, int)
        status = left.code
    err = capsys.readouterr().err
    assert status == 2 and "Traceback" not in err
    return err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num_gpus 2 nowhere.py", "there is no script 'nowhere.py'"),
        ("--num_nodes 2 train.py", "--num_nodes 2, but no hostfile names the hosts: add --hostfile FILE"),
        ("-H hosts --num_gpus 2 train.py", "--num_gpus 2, but host host-a has 1"),
        ("-H hosts --num_nodes 1 -i host-a train.py", "cannot be given with --include or --exclude"),
        ("-H hosts -i host-c train.py", "there is no host host-c"),
        ("-H hosts -i host-a -e host-b train.py", "exclude each other"),
        ("-H hosts --no_ssh train.py", "give each of the hosts (host-a, host-b) its --node_rank, 0 to 1"),
        ("-H hosts --node_rank 0 train.py", "--node_rank is for --no_ssh"),
        ("--launcher openmpi train.py", "--launcher openmpi is not supported, only ssh, pdsh, slurm"),
        ("--launcher MVAPICH train.py", "--launcher mvapich is not supported"),
        ("--launcher slurm train.py", "give a --hostfile, or start inside an allocation"),
        ("--autotuning run train.py", "--autotuning is not supported"),
        ("--elastic_training train.py", "--elastic_training is not supported: start it by torchrun --nnodes MIN:MAX"),
        ("--module --no_python train", "exclude each other"),
        ("--bind_core_list 4000 train.py", "there is no core 4000"),
        ("--enable_each_rank_log hosts train.py", "--enable_each_rank_log hosts: File exists"),
        ("--no_python nonesuch", "there is no program 'nonesuch'"),
        ("--master_port 70000 train.py", "give a number from 1 to 65535"),
        ("--ssh_port -1 train.py", "--ssh_port -1: give a number from 1 to 65535"),
        ("--num_gpus 999999999999 train.py", "--num_gpus: 999999999999 is too much: a host has at most 4096 slots"),
        ("--include localhost:999999999 train.py", "999999999 is too much"),
        ("--master_addr=-x train.py", "--master_addr: '-x' is no host"),
        ("-H hosts --launcher_args=' train.py", "--launcher_args ': No closing quotation"),
        ("--bogus train.py", "unrecognized arguments: --bogus"),
        ("-H hosts train.py", "host down-b cannot be reached by ssh without a password"),
    ],
)
def test_bad_lines_are_status_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_hosts(tmp_path, "host-a down-b" if line == "-H hosts train.py" else "host-a host-b")
    write_script(tmp_path, TELL)
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", fake_transports(tmp_path / "bin")["PATH"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert message in usage_error(capsys, line)


def test_hosts_are_no_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ssh of this machine is used, where there is one: nothing of the file reaches it as an option."""
    marker = tmp_path / "ran"
    (tmp_path / "hosts").write_text(f"-oProxyCommand=touch${{IFS}}{marker} slots=2\n-oFoo slots=2\n")
    script = write_script(tmp_path, TELL)
    for more in ("", "--no_ssh_check ", "--launcher slurm ", "--no_ssh --node_rank 0 "):
        assert "hosts, line 1: '-oProxyCommand" in usage_error(capsys, f"-H {tmp_path / 'hosts'} {more}{script}")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SLURM_JOB_NODELIST", "-oFoo,a", "SLURM_JOB_NODELIST: '-oFoo' is no host"),
        ("SLURM_GPUS_ON_NODE", "999999999999", "SLURM_GPUS_ON_NODE: 999999999999 is too much"),
    ],
)
def test_what_slurm_says_is_checked(
    variable: str,
    value: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = write_script(tmp_path, TELL)
    monkeypatch.setenv("PATH", fake_transports(tmp_path / "bin")["PATH"])
    for name, usual in (("SLURM_JOB_NODELIST", "a,b"), ("SLURM_GPUS_ON_NODE", "1"), (variable, value)):
        monkeypatch.setenv(name, usual)
    assert message in usage_error(capsys, f"--launcher slurm {script}")


def test_a_port_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = write_script(tmp_path, TELL)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} of " in usage_error(capsys, f"--master_port {port} {script}")


def test_a_host_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_hosts(tmp_path, "host-a slow-b")
    script = write_script(tmp_path, TELL)
    assert hosts.REACH_TIMEOUT_S == 15
    monkeypatch.setattr(hosts, "REACH_TIMEOUT_S", 1.0)
    monkeypatch.setenv("PATH", fake_transports(tmp_path / "bin")["PATH"])
    message = usage_error(capsys, f"-H {tmp_path / 'hosts'} {script}")
    assert "host slow-b cannot be reached" in message and "no answer within 1 s" in message


@pytest.mark.slow
def test_hosts_that_refuse(tmp_path: Path) -> None:
    write_script(tmp_path, TELL)
    more = fake_transports(tmp_path / "bin")
    two_hosts(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = launch(tmp_path, "-H", "hosts", "--master_port", port, "train.py", **more)
    assert job.status == 2 and f"port {port} of " in job.err and "host host-a refused the job" in job.err


@pytest.mark.slow
def test_a_missing_hostfile_means_this_host(tmp_path: Path) -> None:
    write_script(tmp_path, TELL)
    job = launch(tmp_path, "--hostfile", "none", "--include", "localhost:0,1", "train.py")
    assert job.status == 0, job.err
    assert "there is no hostfile none: this host only" in job.err
    facts = facts_of(job.out)
    assert [entry["WORLD_SIZE"] for entry in facts] == ["2", "2"]
    assert facts[0]["MASTER_PORT"] == facts[1]["MASTER_PORT"] != "29500"  # a free one: two jobs may start at once


@pytest.mark.parametrize(
    ("line", "visible", "devices"),
    [
        ("", None, ("0", "1", "2", "3")),
        ("--num_gpus 2", None, ("0", "1")),
        ("--include localhost:3,1", None, ("1", "3")),
        ("--exclude localhost:0", None, ("1", "2", "3")),
        ("", "GPU-a,GPU-b,6,7", ("GPU-a", "GPU-b", "6", "7")),  # as SLURM or a user chose them
        ("--num_gpus 2", "4,5,6,7", ("4", "5")),
        ("--include localhost:2", "4,5,6,7", ("2",)),  # names the host's own GPUs, as DeepSpeed does
    ],
)
def test_which_gpus(
    line: str, visible: str | None, devices: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice only: this machine need not have four GPUs."""
    plans: list[JobPlan] = []
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    monkeypatch.setattr("hf_zero.extras.launcher.job.run_node", lambda plan, rank: plans.append(plan))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert main(["launch", *line.split(), str(write_script(tmp_path, TELL))]) == 0
    assert plans[0].devices == (devices,) and plans[0].use_devices


@pytest.mark.parametrize(
    ("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_any_accelerator_counts(kind: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number, and the variable that chooses among them; this machine has neither."""
    seen: list[str | None] = []
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: SimpleNamespace(type=kind))
    monkeypatch.setattr("hf_zero.extras.launcher.node._run_agent", lambda *_: seen.append(os.environ.get(variable)))
    for name in (variable, "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    with patched_environment():
        assert main(["launch", "--include", "localhost:1,3", str(write_script(tmp_path, TELL))]) == 0
        assert "ACCELERATE_USE_CPU" not in os.environ
    assert seen == ["1,3"]


@contextlib.contextmanager
def patched_environment() -> Iterator[None]:
    """Remove afterwards what the launcher has set for its processes."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
