"""`hf-zero launch`: DeepSpeed's launch line, run through torchrun."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from hf_zero.distributed.environment import DEFAULT_PORT
from hf_zero.extras.launcher.job import DEFAULT_HOSTFILE, LAUNCHERS, LaunchOptions, launch
from hf_zero.extras.launcher.job import logger as launch_logger
from hf_zero.extras.launcher.launch_errors import LaunchUsageError

NAME = "launch"
SUMMARY = "start a training script on the GPUs (or CPU processes) of this host, or of several"
EXAMPLES = """
hf-zero launch --num_gpus 2 train.py --zero zero3.json
hf-zero launch --include localhost:1,3 train.py
hf-zero launch --hostfile hosts --num_nodes 2 --num_gpus 8 --master_port 9901 train.py --zero zero3.json
hf-zero launch --hostfile hosts --no_ssh --node_rank 0 --master_addr node-1 train.py
hf-zero launch --num_gpus 2 --module my_package.train
hf-zero launch --num_gpus 2 --as-deepspeed train.py --deepspeed ds_config.json
"""
_REFUSED = {
    "--zero": "it is an option of the script: write it after SCRIPT",
    "--nproc_per_node": "write --num_gpus",
    "--num_processes": "write --num_gpus",
    "--autotuning": "hf_zero does not tune; hf-zero bench measures this machine",
    "--elastic_training": "start it by torchrun --nnodes MIN:MAX",
    "--min_elastic_nodes": "start it by torchrun --nnodes MIN:MAX",
    "--max_elastic_nodes": "start it by torchrun --nnodes MIN:MAX",
    "--detect_nvlink_pairs": "name the GPUs in the wanted order of slots by --include",
}


class _Refuse(argparse.Action):
    """An option of another launcher or of the script, which is not obeyed here; to take it silently would be worse."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None
    ) -> None:
        assert option is not None
        parser.error(f"{option} is not supported: {_REFUSED[option]}")


def configure(parser: argparse.ArgumentParser) -> None:
    _add_placement(parser)
    _add_processes(parser)
    for option in _REFUSED:
        parser.add_argument(option, action=_Refuse, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT", help="a script, or a module or program (--module, --no_python)")
    parser.add_argument("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="handed on to it")


def _add_placement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    add = group.add_argument
    add("--num_gpus", "--num_accelerators", type=int, metavar="N", help="processes per host; without GPUs too")
    add("--num_nodes", type=int, metavar="M", help="the first M hosts of the hostfile")
    add(
        *("-H", "--hostfile"),
        metavar="FILE",
        help=f"lines of the form 'worker-1 slots=8' (default: {DEFAULT_HOSTFILE} where that is; else this host)",
    )
    add("-i", "--include", default="", metavar="SPEC", help="only these: HOST or HOST:0,2, joined by @")
    add("-e", "--exclude", default="", metavar="SPEC", help="all but these")
    add("--master_addr", default="", metavar="ADDR", help="of the first host (default: the address that it names)")
    add(
        "--master_port",
        type=int,
        metavar="PORT",
        help=f"on the first host (default: {DEFAULT_PORT}; a free one where all is on this host)",
    )
    add("--launcher", default="ssh", type=str.lower, metavar="|".join(LAUNCHERS), help="how to get to other hosts")
    add("--launcher_args", default="", metavar="ARGS", help="options for that program, as one argument")
    add("--ssh_port", type=int, metavar="PORT", help="of ssh on the other hosts")
    add("--no_ssh", action="store_true", help="you start this line on every host, each with its --node_rank")
    add("--node_rank", type=int, metavar="K", help="this host's place in the hostfile, from 0, for --no_ssh")
    add("--no_ssh_check", action="store_true", help="do not try first whether the hosts answer")
    add("--force_multi", action="store_true", help="go by ssh to a single host of the hostfile too")
    add("--venv_script", metavar="FILE", help="sourced on every host first")


def _add_processes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what")
    add = group.add_argument
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    add("--no_python", action="store_true", help="SCRIPT is a program of its own")
    add("--as-deepspeed", action="store_true", help="SCRIPT is for DeepSpeed, and finds hf_zero in its place")
    add("--pass_local_rank", action="store_true", help="give --local_rank=K also to a script that does not declare it")
    add("--no_local_rank", action="store_true", help="never give --local_rank=K to the script (LOCAL_RANK is set)")
    add("--enable_each_rank_log", metavar="FOLDER", help="each rank's output into a file of its own there")
    add("--bind_cores_to_rank", action="store_true", help="share this host's cores out among its processes")
    add("--bind_core_list", metavar="CORES", help="the cores to share out, as 0-3,8")
    add("--save_pid", action="store_true", help=f"write the process id of this command to {_pid_file('ID')}")
    add(
        "--log_level",
        default="info",
        choices=("debug", "info", "warning", "error", "critical"),
        help="of this command",
    )
    add("-q", "--quiet", action="store_true", help="as --log_level error")


def _pid_file(name: object) -> Path:
    return Path(tempfile.gettempdir(), f"{name}.hf_zero")


def run(args: argparse.Namespace) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("hf-zero launch: %(message)s"))
    launch_logger.addHandler(handler)
    launch_logger.setLevel("ERROR" if args.quiet else args.log_level.upper())
    values = {entry.name: getattr(args, entry.name) for entry in dataclasses.fields(LaunchOptions)}
    pid_file = _pid_file(os.getpid())
    try:
        if args.save_pid:
            pid_file.write_text(str(os.getpid()))
        launch(LaunchOptions(**values))
    except LaunchUsageError as error:
        raise argparse.ArgumentError(None, str(error)) from None
    finally:
        launch_logger.removeHandler(handler)
        if args.save_pid:
            pid_file.unlink(missing_ok=True)
