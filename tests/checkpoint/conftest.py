"""Temporary folders of these tests lie in memory, but for tests that read checkpoints in every way there is."""

from pathlib import Path

import pytest

from tests.harness.in_memory import tmp_path_factory

__all__ = ["tmp_path", "tmp_path_factory"]

# The page cache has every file that lies in memory, so nothing there would be read past it.
_ON_DISK = ("changed_runs", "checkpoint_files", "consolidate", "load_fp32", "rank_files", "resume", "zero_to_fp32")


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.path.stem.removeprefix("test_") not in _ON_DISK:
        return tmp_path
    folder: Path = request.getfixturevalue("disk_path")
    return folder
