"""The two ways in which a launch ends badly: the line was wrong, or the job failed."""

from __future__ import annotations

from hf_zero.errors import ConfigError, ZeroError


class LaunchUsageError(ConfigError):
    """The launch line, the hostfile or the hosts are wrong; nothing was started. Exit status 2."""


class LaunchFailed(ZeroError):
    """A process of the job failed, or the launcher got a signal to stop. Exit status 1."""
