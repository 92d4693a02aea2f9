"""Temporary folders in memory, for rooms whose tests write hundreds of small files: most of their time was waiting for
a disk to sync and to delete them. Tests of the disk itself, and what is offloaded to one, stay on it: `disk_path`."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
NEEDED_BYTES = 2 << 30  # the tests of a room leave some hundred MB


@pytest.fixture(scope="session")
def tmp_path_factory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[pytest.TempPathFactory]:
    """pytest's own, and with it `tmp_path`, in memory. A conftest.py that imports this puts its folder of tests there.

    Where there is no memory for that, or --basetemp was given to one process, it is pytest's as it is.
    """
    is_worker = hasattr(request.config, "workerinput")  # which always has a --basetemp
    root = memory_folder()
    if root is None or (request.config.option.basetemp and not is_worker):
        yield tmp_path_factory
        return
    folder = Path(tempfile.mkdtemp(prefix="hf-zero-tests-", dir=root))
    yield pytest.TempPathFactory(folder / "tests", 0, "failed", lambda *_: None, _ispytest=True)
    shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def memory_folder() -> Path | None:
    """Return where files are memory, if there is enough of it and they can be used as those of a disk."""
    if not os.access(SHARED_MEMORY, os.W_OK) or shutil.disk_usage(SHARED_MEMORY).free < NEEDED_BYTES:
        return None
    return SHARED_MEMORY if _takes_direct() else None


def _takes_direct() -> bool:
    """Whether files there are read and written past the page cache, as on a disk: tmpfs since Linux 6.6."""
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as file:
        try:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        except (OSError, AttributeError):
            return False
    return True
