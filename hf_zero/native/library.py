"""Finds and loads the compiled library. Nothing is compiled here, and importing hf_zero does not load it.

The library lies beside the package in an installed wheel; an editable install puts it elsewhere and tells
importlib.resources. HF_ZERO_LIBRARY names another one, for work on the C++ sources.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import os
import platform
from functools import cache
from pathlib import Path

from hf_zero.errors import NativeError

ABI_VERSION = 7  # HZ_ABI_VERSION of csrc/hz_api.h: the C structures that this package fills
LIBRARY_VARIABLE = "HF_ZERO_LIBRARY"
_FILE = "libhf_zero_native.so"
_REMEDY = (
    "Install a C++ compiler (Debian and Ubuntu: apt-get install g++), then build the library: "
    "pip install -e . in a clone of hf_zero"
)


@cache
def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        NativeError: It is missing, cannot be loaded, or was built from other sources than this package.
    """
    path = library_path()
    try:
        # CDLL, not PyDLL: other Python threads run while a function of the library does.
        loaded = ctypes.CDLL(str(path))
        version = loaded.hz_abi_version
    except OSError as error:
        raise NativeError(f"the native library cannot be loaded: {error}\n{_REMEDY}") from error
    except AttributeError as error:
        raise NativeError(f"{path} is no library of hf_zero: it has no hz_abi_version.\n{_REMEDY}") from error
    version.argtypes, version.restype = [], ctypes.c_int32
    if version() != ABI_VERSION:
        raise NativeError(
            f"{path} was built from other sources: its interface is version {version()}, "
            f"this package needs {ABI_VERSION}.\n{_REMEDY}"
        )
    return loaded


@cache
def function(name: str) -> ctypes._NamedFuncPointer:
    """The library's function of this name, one that returns an int32. Raises what `library` does."""
    found: ctypes._NamedFuncPointer = getattr(library(), name)
    found.restype = ctypes.c_int32
    return found


@cache
def has_library() -> bool:
    """Whether `library` gives one, for what can do without."""
    try:
        library()
    except NativeError:
        return False
    return True


def library_path() -> Path:
    """The path of the library.

    Raises:
        NativeError: There is none.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise NativeError(
                f"{LIBRARY_VARIABLE}={named} is not a file: unset it, or name the compiled {_FILE}.\n{_REMEDY}"
            )
        return Path(named)
    found = importlib.resources.files("hf_zero.native").joinpath(_FILE)
    if not isinstance(found, Path) or not found.is_file():
        if platform.system() != "Linux":
            raise NativeError(
                "offload_optimizer and offload to disk need hf_zero's native library, which is built for Linux, and "
                f'this is {platform.system()}: set the device of both offload blocks to "none".'
            )
        raise NativeError(
            f"hf_zero's native library ({_FILE}) is missing: pip installs hf_zero without it where there is no C++ "
            f"compiler. Offload of optimizer states, offload to disk and CPUAdam need it.\n{_REMEDY}"
        )
    return found
