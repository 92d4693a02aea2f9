"""The time of a training step, by a model of what ranks compute and what they get from each other.

On devices a pass takes as long as the longer of its computation and its communication, which run beside each other,
and besides the first of its operations, which nothing hides. Communication takes a latency for each operation, and as
long as the slower of two links needs for its bytes: the link inside of a host, which each rank has, and the one
between hosts, which a host's ranks share. Nothing hides what comes after backward, such as the gathers of updated
parameters.

Ranks that compute on the CPU do the work of communicating themselves, and make the values of 8-bit messages: both are
added to their computation, and only what the link between hosts needs beyond that time, and for the first operation,
is waited for. After backward, where operations follow each other without a layer between them, the work for one goes
on beside the bytes of others.

Not in it: the optimizer's update, and copies to and from what is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from hf_zero.extras.estimate.profile import Profile
from hf_zero.extras.estimate.traffic import Pass, Traffic


@dataclass(frozen=True)
class Speeds:
    """The speeds that a rank reaches, in seconds, bytes per second and operations per second."""

    flops: float
    link: float  # bytes that a rank gets from the ranks of its host
    network: float  # bytes that a host gets from the others
    latency: float  # of an operation

    on_host: bool = False  # ranks compute on the CPU
    decode: float = inf  # bytes of the values that such a rank makes of 8-bit messages

    def waiting(self, traffic: Traffic, computing: float, per_host: int) -> float:
        """Return by how many seconds a pass with this `traffic` of a rank is longer than its `computing`.

        Args:
            per_host: The ranks of a host, which have as much traffic each.
        """
        operations = traffic.operations * self.latency
        network = traffic.across * per_host / self.network
        if self.on_host:
            work = operations + (traffic.inside + traffic.across) / self.link + traffic.decoded / self.decode
            others = network
            if not computing:
                return max(work, others)
        else:
            work, others = 0.0, operations + max(traffic.inside / self.link, network)
        first = others / max(traffic.operations, 1)
        return work + max(others - computing, 0.0) + min(first, computing)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    computing: float
    waiting: float  # for communication, or busy with it
    across: float  # bytes that a host gets from the others

    @property
    def total(self) -> float:
        return self.computing + self.waiting


def step_time(passes: Iterable[Pass], profile: Profile, speeds: Speeds, *, per_host: int) -> StepTime:
    """Return the time of a step of these passes (Plan.passes), where each host has `per_host` ranks."""
    flops = {"forward": profile.forward_flops, "backward": profile.backward_flops, "update": 0}
    computing = waiting = across = 0.0
    for one in passes:
        compute = flops[one.name] / speeds.flops
        computing += one.times * compute
        waiting += one.times * speeds.waiting(one.traffic, compute, per_host)
        across += one.times * one.traffic.across * per_host
    return StepTime(computing, waiting, across)
