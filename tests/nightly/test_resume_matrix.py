"""The resume matrix: a run that is saved and goes on, against the same run resumed in another place.

Sources and targets are worlds of 1 to 4 ranks x stages 0 to 3 x offload to none, cpu, nvme (stage 0 has no offload).
The next 5 losses are equal to the uninterrupted run's to 1e-6, bit for bit where the place is the same; the weights
that were loaded are equal bit for bit everywhere, learning rates too. The same processes resume from all sources at
one place, into a new model and engine each; where they fail, each pair is tried by processes of its own. 1600 pairs
take 27 minutes on two busy cores.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch

from tests.checkpoint.test_resume import resume_each, save_each
from tests.harness import ranks

WORLDS = (1, 2, 3, 4)


class Place(NamedTuple):
    """A place is where a run is."""

    world: int
    stage: int
    medium: str

    def __str__(self) -> str:
        return f"{self.world} x stage {self.stage} x {self.medium}"


MEDIA = ("none", "cpu", "nvme")
PLACES = [Place(*one) for one in itertools.product(WORLDS, range(4), MEDIA) if one[1] or one[2] == "none"]


def save_at(sources: list[Place], scratch: str) -> dict[Place, dict[str, Any]]:
    """Save a run at each place; what it went on as."""
    found: dict[Place, dict[str, Any]] = {}
    for world, group in itertools.groupby(sources, key=lambda place: place.world):
        mine = list(group)
        calls = [(place.stage, folder_of(place, scratch), place.medium) for place in mine]
        found.update(zip(mine, ranks.run_ranks(save_each, world, calls, timeout=limit(mine))[0], strict=True))
    return found


def folder_of(source: Place, scratch: str) -> str:
    return f"{scratch}/{source}".replace(" ", "-")


def limit(places: list[Place]) -> float:
    """Seconds for one job."""
    return 60 + 10 * len(places)


def resume_at(target: Place, sources: list[Place], scratch: str) -> tuple[list[dict[str, Any]], str]:
    """Return what the runs of `sources` go on as at `target`; or nothing, and why."""
    call: Any = (resume_each, (target.stage, [folder_of(source, scratch) for source in sources], target.medium), {})
    ended = ranks.try_ranks(call, target.world, timeout=limit(sources), wait_for_all=False)
    failed = [one for one in ended.outcomes if isinstance(one, ranks.RankFailure)]
    if ended.hang or failed:
        return [], f"it failed: {ended.hang or failed[0]}"
    return ended.outcomes[0], ""


def problems_at(target: Place, sources: list[Place], scratch: str, want: dict[Place, dict[str, Any]]) -> list[str]:
    """Return what is wrong with the resumes at one place."""
    results, reason = resume_at(target, sources, scratch)
    if reason and len(sources) > 1:
        alone = [text for source in sources for text in problems_at(target, [source], scratch, want)]
        return alone or [f"saved on {len(sources)} places, resumed on {target} by the same processes: {reason}"]
    if reason:
        return [f"saved on {sources[0]}, resumed on {target}: {reason}"]
    pairs = zip(sources, results, strict=True)
    texts = {source: problem_of(want[source], got, exact=source == target) for source, got in pairs}
    return [f"saved on {source}, resumed on {target}: {text}" for source, text in texts.items() if text]


def problem_of(want: dict[str, Any], got: dict[str, Any], *, exact: bool) -> str:
    """Return what is wrong with a run that was resumed; "" if nothing is."""
    other = [name for name, tensor in want["weights"].items() if not torch.equal(got["weights"][name], tensor)]
    if other:
        return f"other weights: {', '.join(other)}"
    if got["lr"] != want["lr"]:
        return f"other learning rates: {got['lr']}, {want['lr']}"
    pairs = zip(got["losses"], want["losses"], strict=True)
    worst = max(abs(mine - its) / abs(its) for mine, its in pairs)
    return (
        "" if worst <= (0 if exact else 1e-6) else f"losses differ by {worst:.1e}: {got['losses']}, {want['losses']}"
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[Place, dict[str, Any]]]:
    """A folder with a run saved at each place, and how each of them went on."""
    scratch = str(tmp_path_factory.mktemp("saved"))
    return scratch, save_at(PLACES, scratch)


@pytest.mark.parametrize("target", PLACES, ids=str)
def test_a_run_goes_on_at_any_place(target: Place, saved: tuple[str, dict[Place, dict[str, Any]]]) -> None:
    scratch, want = saved
    problems = problems_at(target, PLACES, scratch, want)
    assert not problems, "\n".join(problems)
