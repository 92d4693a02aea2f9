"""The seconds that ranks wait for each other before they look, or give up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timeouts:
    """Seconds. They hold for all groups of the process; tests, whose ranks are to fail, make them shorter."""

    presence: float = 9.0  # a call that needs every rank waits so long for the others, then it says who is missing
    look_for_ended: float = 0.25  # between two looks at the connections in that wait: who has gone will not come
    first_look: float = 0.05  # until the wait for a collective looks at the connections for the first time
    look_every: float = 0.5  # between two such looks, at most
    # Others may have their last messages on their way to each other when a rank leaves: they get so long for them.
    grace: float = 5.0
    unreachable: float = 60.0  # a connection whose other host has not answered for so long has ended
    stalled: float = 1.0  # then a rank that waits compares its operations with those of the others
    compare_every: float = 8.0  # between two such comparisons, at most
    say_every: float = 60.0  # between two lines about a wait that goes on


TIMEOUTS = Timeouts()
