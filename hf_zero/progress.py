"""Progress bars of work that may take long: on stderr, if that is a terminal, once the work has taken two seconds.

One rank shows a bar; the caller says which. The stand-alone checkpoint/consolidate.py draws its own, without tqdm.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

# Seconds before a bar appears: what is over by then needs none.
DELAY_S = 2.0

Done = Callable[[int], object]  # called with how much more is done


def ignore(count: int) -> None:
    """Show nothing: the counter of a caller that wants no bar."""


@contextlib.contextmanager
def progress(title: str, total: int | None, *, unit: str = "B", shown: bool = True) -> Iterator[Done]:
    """A bar for the work inside, which calls what this gives, from one thread, with how much more is done.

    Where no bar can appear, nothing is made: tqdm would start a thread and take a semaphore.

    Args:
        total: In units; None: not known, so the bar only counts.
        unit: "B" for bytes, where bytes are what takes the time.
        shown: False on all ranks but one.
    """
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield ignore
        return
    from tqdm import tqdm  # commands that show no bar start without it

    is_bytes = unit == "B"
    with tqdm(
        total=total,
        desc=title,
        unit=unit if is_bytes else f" {unit}",
        unit_scale=is_bytes,
        delay=DELAY_S,
        leave=False,
        file=sys.stderr,
        dynamic_ncols=True,
    ) as bar:
        yield bar.update
