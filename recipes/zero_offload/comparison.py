"""The losses of several runs side by side, and where the memory of each was: printed, and kept as compare.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.zero_offload.media import Media

COMPARISON = "compare.json"
DIGITS = 4  # of a printed loss, after the point


@dataclass(frozen=True)
class Result:
    """One run."""

    name: str
    delayed: bool  # its updates are one step late, so its losses are near, not equal
    losses: list[float]  # one per logged step
    media: list[Media]  # by rank
    step_s: float

    def printed(self) -> list[str]:
        return [f"{loss:.{DIGITS}f}" for loss in self.losses]


def show(steps: Sequence[int], results: Sequence[Result]) -> None:
    """Print losses, a sentence about each run, and memory. The first run is what the others are compared with."""
    width = max(len(result.name) for result in results) + 2
    print("\nstep" + "".join(f"{result.name:>{width}}" for result in results))
    for number, row in zip(steps, zip(*(result.printed() for result in results), strict=True), strict=True):
        print(f"{number:>4}" + "".join(f"{loss:>{width}}" for loss in row))
    print("time" + "".join(f"{f'{result.step_s:.2f} s':>{width}}" for result in results))
    print()
    for result in results[1:]:
        print(f"{result.name}: {verdict(results[0], result)}")

    print(f"\n{'memory between steps':{width + 8}}{'device':>12}{'host':>12}{'disk':>12}")
    for result in results:
        for rank, media in enumerate(result.media):
            print(f"{result.name if rank == 0 else '':{width}}rank {rank:<3}{media.line()}")
    print()
    for result in results[1:]:
        print(f"{result.name}: left the device of rank 0: {result.media[0].left_device()}")


def verdict(plain: Result, other: Result) -> str:
    """Compare the losses of `other` with those of `plain` in one sentence."""
    pairs = list(zip(plain.losses, other.losses, strict=True))
    largest = max(abs(one - two) for one, two in pairs)
    differing = sum(one != two for one, two in zip(plain.printed(), other.printed(), strict=True))
    if other.delayed:
        return f"updates are one step late; the losses differ by at most {largest:.{DIGITS}f}"
    if not differing:
        return f"the losses of all {len(pairs)} steps are equal to the printed digits"
    return f"{differing} of {len(pairs)} losses differ, by at most {largest:.2g}"


def write(folder: Path, steps: Sequence[int], results: Sequence[Result]) -> None:
    """Keep what was shown, in full precision."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"steps": list(steps), "runs": [dataclasses.asdict(result) for result in results]}
    (folder / COMPARISON).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
