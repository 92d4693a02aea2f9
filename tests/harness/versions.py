"""The versions of other packages that the tests run beside: scripts/test_versions.sh runs them beside older ones."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version


def is_older(package: str, than: str) -> bool:
    """Whether the installed version of `package` is before `than`."""
    return Version(version(package)) < Version(than)
