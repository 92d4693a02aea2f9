"""Many cases, one after the other: counts, failures, and the smallest form of a failing case."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from tests.fuzz.cases import Case, Phase, draw
from tests.fuzz.judge import EQUAL, FAILED, REFUSED, Verdict, judge


@dataclasses.dataclass
class Report:
    """A report says what a campaign found."""

    kinds: Counter[str] = dataclasses.field(default_factory=Counter)
    models: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)  # (model, kind)
    stages: Counter[tuple[int, str]] = dataclasses.field(default_factory=Counter)  # (stage of a phase, kind)
    failures: list[tuple[Case, Verdict]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def count(self, case: Case, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        self.models[case.model, verdict.kind] += 1
        for stage in {phase.stage for phase in case.phases}:
            self.stages[stage, verdict.kind] += 1
        if verdict.kind == FAILED:
            self.failures.append((case, verdict))

    def never_compared(self, models: Iterable[str]) -> list[str]:
        """Return the models that were equal in no case: nothing is known of them."""
        return [name for name in models if not self.models[name, EQUAL]]

    def __str__(self) -> str:
        total = sum(self.kinds.values())
        lines = [f"{total} cases in {self.seconds:.0f} s: " + _kinds(self.kinds)]
        for stage in sorted({stage for stage, _ in self.stages}):
            of_stage = Counter({kind: count for (key, kind), count in self.stages.items() if key == stage})
            lines.append(f"  stage {stage}: {_kinds(of_stage)}")
        for model in sorted({model for model, _ in self.models}):
            of_model = Counter({kind: count for (key, kind), count in self.models.items() if key == model})
            lines.append(f"  {model}: {_kinds(of_model)}")
        return "\n".join(lines)


def _kinds(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in (EQUAL, REFUSED, FAILED) if counts[kind])


def cases(seed: int, *, only: str = "", world: int = 0) -> Iterator[Case]:
    """The cases of a seed in order, without end; those of one model, or with phases of one world size only."""
    number = 0
    while True:
        case = draw(seed, number)
        number += 1
        if (not only or case.model == only) and (not world or all(phase.world == world for phase in case.phases)):
            yield case


def run(chosen: Iterable[Case], *, until: float = float("inf"), show: Callable[[Case, Verdict], None]) -> Report:
    """Judge cases until `until` (of time.monotonic) or their end."""
    report, start = Report(), time.monotonic()
    for case in chosen:
        if time.monotonic() >= until:
            break
        verdict = judge(case)
        report.count(case, verdict)
        show(case, verdict)
    report.seconds = time.monotonic() - start
    return report


# ---------------------------------------------------------------- the smallest case
def shrink(case: Case, show: Callable[[str], None]) -> Case:
    """Leave out what the failure does not need, one thing after the other, until nothing more can go."""
    wanted = _sort_of_failure(judge(case))
    changed = True
    while changed:
        changed = False
        for simpler in _simpler(case):
            verdict = judge(simpler)
            if verdict.kind == FAILED and _sort_of_failure(verdict) == wanted:
                show(f"still fails: {simpler}")
                case, changed = simpler, True
                break
    return case


def _sort_of_failure(verdict: Verdict) -> str:
    """A mismatch, or which exception: what is shrunk must not become another failure."""
    if verdict.text.startswith("mismatch"):
        return "nan" if "nan" in verdict.text else "mismatch"
    raised = re.findall(r"^(?:\w+\.)*(\w+): (.{0,12})", verdict.text, re.MULTILINE)
    return " ".join(raised[-1]) if raised else verdict.text[:20]


def _simpler(case: Case) -> Iterator[Case]:
    plain = Case(case.model)
    for phase in case.phases if len(case.phases) > 1 else ():
        yield dataclasses.replace(case, phases=(phase,), events=tuple(e for e in case.events if e[0] < phase.steps))
    for index in range(len(case.events)):
        yield dataclasses.replace(case, events=case.events[:index] + case.events[index + 1 :])
    for field in dataclasses.fields(Case):
        kept = field.name in ("model", "seed", "number", "phases", "events", "block")
        if not kept and getattr(case, field.name) != getattr(plain, field.name):
            yield dataclasses.replace(case, **{field.name: getattr(plain, field.name)})
    for index, phase in enumerate(case.phases):
        for simpler in _simpler_phases(phase):
            if sum(p.steps for p in case.phases) - phase.steps + simpler.steps > max(
                (e[0] for e in case.events), default=0
            ):
                yield dataclasses.replace(case, phases=(*case.phases[:index], simpler, *case.phases[index + 1 :]))


def _simpler_phases(phase: Phase) -> Iterator[Phase]:
    for name in ("zero", "offload"):
        pairs = getattr(phase, name)
        for index in range(len(pairs)):
            fewer = pairs[:index] + pairs[index + 1 :]
            if "sharding_group" in dict(fewer) or "hybrid_shard" not in dict(fewer):
                yield dataclasses.replace(phase, **{name: fewer})
    for name in ("offload_param", "offload_optimizer"):
        if getattr(phase, name) != "none":
            yield dataclasses.replace(phase, **{name: "none"})
    if phase.offload_optimizer == "nvme":
        yield dataclasses.replace(phase, offload_optimizer="cpu")
    in_groups = "sharding_group" in dict(phase.zero)
    if phase.world > 1 and not in_groups:
        yield dataclasses.replace(phase, world=phase.world - 1)
    if phase.steps > 1:
        yield dataclasses.replace(phase, steps=phase.steps - 1)
    if phase.stage > in_groups and phase.offload_optimizer == phase.offload_param == "none":
        yield dataclasses.replace(phase, stage=phase.stage - 1)
