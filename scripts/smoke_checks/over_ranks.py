"""Every stage and medium on several ranks: the losses of one process, and what a step waits for and sends."""

from __future__ import annotations

from collections.abc import Iterator

from smoke_checks import place, waits
from smoke_checks.rows import Row
from smoke_checks.settings import MEDIA, Setting
from smoke_checks.training import TOLERANCE, Task, difference, of_all_ranks, train, train_by_torch, wrong_waits


def check(task: Task, device: str, world_size: int) -> Iterator[Row]:
    """Yield the rows on every rank; all get the same ones."""
    expected = train_by_torch(task, world_size)
    for setting in task.of(Setting(stage, medium) for stage, media in MEDIA.items() for medium in media):
        if not setting.is_delayed:
            yield _row(task, setting, device, expected)


def _row(task: Task, setting: Setting, device: str, expected: list[list[float]]) -> Row:
    trained = train(task, setting, device, count_waits=True)
    problem = wrong_waits(trained, setting)
    mine = (trained.losses, [*filter(None, [problem]), *place.reports(device)])
    everyone = of_all_ranks(mine)
    off = max(difference(losses, wanted) for (losses, _), wanted in zip(everyone, expected, strict=True))
    problems = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(everyone) for text in texts]
    if off > TOLERANCE[setting.precision]:
        problems.insert(0, f"a loss is off by {off:.1e}")
    step = ", ".join(f"{count} {name}" for name, count in trained.collectives.items())
    seen = f"losses within {off:.1e} of one process's; a step: {step}; waits: {waits.in_words(trained.waits)}"
    return Row.judged(f"{len(expected)} ranks, {setting}", not problems, "; ".join(problems) or seen)
