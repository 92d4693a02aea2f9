"""The device "lag" of csrc/lag.cpp: builds it, makes it torch's accelerator in this process, and asks it questions.

`enable()` is for a process of its own (a rank of `run_ranks`): a process has one accelerator for good, and autograd's
threads for it start with the first backward.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

NAME = "lag"
_SOURCE = Path(__file__).parent / "csrc" / "lag.cpp"
_MODULE = "lag_native"
_TORCH = "2.13"  # whose interfaces lag.cpp implements; each minor version changes some
_BUILD_SECONDS = 300
_STACK_FRAMES = 4
_OF_TORCH = os.path.dirname(torch.__file__)
_schedule = "late"


def reason_to_skip() -> str | None:
    """Return, in a sentence, why this environment cannot build the device; None if it can."""
    if platform.system() != "Linux":
        return "the lag device is built on Linux only"
    if ".".join(torch.__version__.split(".")[:2]) != _TORCH:
        return f"the lag device is written for torch {_TORCH}, and this is torch {torch.__version__}"
    if shutil.which(_compiler()[0]) is None:
        return f"the lag device needs a C++ compiler, and there is no {_compiler()[0]}"
    return None


def build() -> Path:
    """Compile lag.cpp, once for each version of it, of torch and of Python; returns the library."""
    command = [*_compiler(), *_flags()]
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((command, torch.__version__, sys.version)).encode()).hexdigest()
    folder = Path(cpp_extension.get_default_build_root()) / "hf_zero_lag" / f"torch-{torch.__version__}"
    library = folder / f"{_MODULE}-{key[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
            if not library.exists():
                _compile(command, library)
    return library


def enable() -> None:
    """Make the lag device this process's accelerator; LAG_SCHEDULE and LAG_MEMORY_LIMIT of the environment hold."""
    native = library()
    native.set_locator(_place)
    set_schedule(os.environ.get("LAG_SCHEDULE", "late"))
    native.set_memory_limit(int(os.environ.get("LAG_MEMORY_LIMIT", "0")))
    torch.utils.rename_privateuse1_backend(NAME)
    from tests.lag import torch_lag

    torch._register_device_module(NAME, torch_lag)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.empty(1).pin_memory()  # torch finds no pointer pinned before it has set up the accelerator


def set_schedule(schedule: str) -> None:
    """Choose when tasks run: "late", when somebody must wait for them; "early", at once; "random:SEED", by coins.

    The coins begin anew. All ranks call at the same place: a coin that runs a collective must fall alike on all.
    """
    global _schedule
    _schedule = schedule
    library().set_schedule(schedule)


def schedule() -> str:
    """The one that was chosen last."""
    return _schedule


def set_memory_limit(nbytes: int) -> None:
    """Set the bytes that each device has; 0 for no limit. Who asks for more gets torch.OutOfMemoryError."""
    library().set_memory_limit(nbytes)


def queued_tasks() -> int:
    """Return the number of tasks of all streams that have not run."""
    count: int = library().queued_tasks()
    return count


def take_reports() -> list[str]:
    """The program's mistakes that were found since the last call. What no call has raised by now, none will."""
    return list(library().take_reports())


def take_syncs() -> list[tuple[str, str]]:
    """The host's waits for the device since the last call: what waited, and the innermost lines of Python."""
    return [tuple(sync) for sync in library().take_syncs()]


def set_pinned_limit(nbytes: int) -> None:
    """Set the bytes of host memory that may be pinned; 0 for no limit. Beyond it pinning raises RuntimeError."""
    library().set_pinned_limit(nbytes)


def pinned_bytes() -> int:
    """Return the bytes of host memory that are pinned now, by torch's allocator or in place. What is copied from or to
    stays.
    """
    nbytes: int = library().pinned_bytes()
    return nbytes


def pinned_ranges() -> int:
    """Return the number of pieces in which host memory was pinned."""
    count: int = library().pinned_ranges()
    return count


@contextmanager
def pinned(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pin a CPU tensor's memory in place, as cudaHostRegister does."""
    library().register_pinned(tensor.data_ptr(), tensor.nbytes)
    try:
        yield tensor
    finally:
        library().unregister_pinned(tensor.data_ptr())


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


def _flags() -> list[str]:
    """Return the flags that torch.utils.cpp_extension.load has, which would need ninja."""
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Wno-unknown-pragmas"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    flags += [part for path in includes for part in ("-isystem", path)]
    flags += [f"-L{path}" for path in cpp_extension.library_paths()]
    return [*flags, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def _compile(command: list[str], library: Path) -> None:
    part = library.with_suffix(".part")
    # Sources before libraries: the linker takes from a library what was asked for until then.
    full = [command[0], str(_SOURCE), *command[1:], "-o", str(part)]
    done = subprocess.run(full, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"lag.cpp could not be compiled: {shlex.join(full)}\n{done.stderr[-8000:]}")
    os.replace(part, library)


@cache
def library() -> ModuleType:
    """The compiled lag.cpp."""
    path = str(build())
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, path)
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _place() -> str:
    """Return where the program is: the innermost lines that are not torch's."""
    frames = [frame for frame in traceback.extract_stack()[:-1] if not frame.filename.startswith(_OF_TORCH)]
    lines = [f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in frames[-_STACK_FRAMES:]]
    return " < ".join(reversed(lines))
