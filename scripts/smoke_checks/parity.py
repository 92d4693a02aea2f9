"""Every stage and medium on one device: the losses of the CPU, and no wait of the host but those that are known."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from smoke_checks import place, waits
from smoke_checks.rows import NOT_SEEN, OK, Row
from smoke_checks.settings import Setting, every_setting
from smoke_checks.training import TOLERANCE, Task, difference, train, train_by_torch, train_on_the_cpu, wrong_waits


def check(task: Task, device: str) -> Iterator[Row]:
    expected = train_by_torch(task)[0]
    moved = difference(train_by_torch(task, lr=0.0)[0], expected)  # else equal losses would say nothing of updates
    yield Row.judged("updates show in the losses", moved > max(TOLERANCE.values()), f"by {moved:.1e}")
    unpinned = _Unpinned()
    logging.getLogger("hf_zero").addHandler(unpinned)
    for setting in task.of(every_setting()):
        yield _row(task, setting, device, expected)
    yield _pinned(unpinned)


def _row(task: Task, setting: Setting, device: str, by_torch: list[float]) -> Row:
    """Compare with torch alone; delayed updates and 16-bit types are hf_zero's own, so with it on the CPU."""
    alike = setting.precision == "fp32" and not setting.is_delayed
    expected = by_torch if alike else train_on_the_cpu(task, setting)
    trained = train(task, setting, device, count_waits=True)
    off = difference(trained.losses, expected)
    problems = [f"a loss is off by {off:.1e}"] if off > TOLERANCE[setting.precision] else []
    problems += filter(None, [wrong_waits(trained, setting)])
    problems += place.reports(device)
    beside = "torch" if alike else "hf_zero"
    seen = f"losses within {off:.1e} of {beside}'s on the CPU; waits: {waits.in_words(trained.waits)}"
    return Row.judged(str(setting), not problems, "; ".join(problems) or seen)


def unseen(can_count: bool) -> Iterator[Row]:
    """The rows that this check does not see there."""
    if not can_count:
        yield Row("waits of the host", NOT_SEEN, "torch counts them on CUDA only")


class _Unpinned(logging.Handler):
    """Warnings of host memory that the system did not let hf_zero pin."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "could not be pinned" in record.getMessage():
            self.found.append(record.getMessage())


def _pinned(unpinned: _Unpinned) -> Row:
    if unpinned.found:
        return Row("pinned host memory", NOT_SEEN, unpinned.found[0])
    return Row("pinned host memory", OK, "all that was to be pinned was")
