"""The versions of transformers, accelerate and PEFT that hf_zero was run with. Others are refused in one sentence.

Inside the range nothing asks for a version: functions of theirs are told apart by their signatures (patching.py), and
arguments that only some versions have are handed on as they came.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from packaging.specifiers import SpecifierSet

from hf_zero.errors import ConfigError

SUPPORTED = {"accelerate": ">=1.11,<1.16", "peft": ">=0.18,<0.22", "transformers": ">=5.6,<5.25"}


def check_versions(*packages: str) -> None:
    """Raise if one of `packages` is installed in another version than hf_zero was run with.

    Raises:
        ConfigError: Names every such version, and what to install.
    """
    wrong = [name for name in packages if not SpecifierSet(SUPPORTED[name]).contains(version(name), prereleases=True)]
    if wrong:
        raise ConfigError(f"hf_zero does not run with {found(wrong)}: install what it was run with, {remedy(wrong)}.")


def found(packages: Iterable[str]) -> str:
    """Return the installed versions, for a message."""
    return ", ".join(f"{name} {version(name)}" for name in packages)


def remedy(packages: Iterable[str]) -> str:
    """Return the command that installs versions in the range."""
    return "pip install " + " ".join(f'"{name}{SUPPORTED[name]}"' for name in packages)
