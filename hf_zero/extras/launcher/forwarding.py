"""The environment variables that a job on several hosts takes along."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from hf_zero.extras.launcher.launch_errors import LaunchUsageError

# DeepSpeed's list (NCCL there where the accelerator is CUDA), and gloo's, which names the network interface on CPUs.
PREFIXES = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "GLOO")
# On these clusters every node has values of its own.
_LOCAL_TO_NODE = {"AISC_JOB_NAME": ("NCCL_IB_HCA", "UCX_NET_DEVICES")}
_FOLDERS = ("~", ".")
DEEPSPEED_FILE = ".deepspeed_env"


def exported(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """The variables of this process that go along; PYTHONPATH gets `folder`, where the job runs, in front."""
    kept_back = {name for mark, names in _LOCAL_TO_NODE.items() if mark in environment for name in names}
    chosen = {
        name: value
        for name, value in environment.items()
        # A shell can only export names; PYTHON* also matches functions that bash exports as BASH_FUNC_python%%.
        if name.startswith(PREFIXES) and name not in kept_back and re.fullmatch(r"\w+", name, re.ASCII)
    }
    chosen["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, environment.get("PYTHONPATH")]))
    return chosen


def environment_files() -> list[Path]:
    """The files that add variables: DeepSpeed's name (or what DS_ENV_FILE says), then ours; home, then here."""
    names = (os.environ.get("DS_ENV_FILE", DEEPSPEED_FILE), ".hf_zero_env")
    paths = [Path(folder).expanduser() / name for name in names for folder in _FOLDERS]
    return list(dict.fromkeys(path for path in paths if path.is_file()))


def read_environment_file(path: Path) -> dict[str, str]:
    """NAME=VALUE lines; blank lines and those that begin with # do not count.

    Raises:
        LaunchUsageError: A line is neither, or the file is no text.
    """
    found = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise LaunchUsageError(f"{path} is no text in UTF-8: {error}") from None
    for number, raw in enumerate(lines, start=1):
        line = raw.strip().removeprefix("export ")
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name.strip(), re.ASCII) or "\0" in value:
            raise LaunchUsageError(f"{path}, line {number}: {line!r} is not of the form NAME=VALUE")
        value = value.strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name.strip()] = value
    return found


def shell_exports(exports: Mapping[str, str], from_files: Mapping[str, str]) -> str:
    """`export A=...; export B=...; ` for a remote shell. It expands $NAME and ${NAME} in what the files say,
    and nothing else: no command is run by them."""
    parts = [f"export {name}={shlex.quote(value)}; " for name, value in exports.items() if name not in from_files]
    for name, value in from_files.items():
        quoted = re.sub(r'(["`\\]|\$(?!\w|\{\w+\}))', r"\\\1", value, flags=re.ASCII)
        parts.append(f'export {name}="{quoted}"; ')
    return "".join(parts)
