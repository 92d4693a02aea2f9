"""Temporary folders of these tests lie in memory."""

from tests.harness.in_memory import tmp_path_factory

__all__ = ["tmp_path_factory"]
