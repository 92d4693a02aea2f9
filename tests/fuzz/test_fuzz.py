"""A part of the fuzz test that is the same every time, and rows that must be in it; `scripts/fuzz.py` runs for long.

Every model of tests/fuzz in one drawn configuration, against one process. `--replay SEED:NUMBER` of the script runs a
case again; rows that are written out here are run by this file only.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import campaign, judge
from tests.fuzz.cases import Case, Phase, draw, expected_errors
from tests.fuzz.judge import EQUAL, FAILED, REFUSED
from tests.fuzz.reference import train_reference
from tests.fuzz.registry import MODELS
from tests.harness.ranks import Ended, RankFailure
from tests.harness.scripts import run_script

SEED = 2026
PARTS = 6  # of the models, so that each of these tests ends within its time
ROOT = Path(__file__).resolve().parents[2]


def first_compared(model: str) -> Case:
    """The first case of the model that nothing refuses."""
    return next(case for case in campaign.cases(SEED, only=model) if not expected_errors(case))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS))])
def test_every_model_follows_one_process(part: int) -> None:
    chosen = sorted(MODELS)[part::PARTS]
    report = campaign.run(map(first_compared, chosen), show=lambda case, verdict: None)
    assert not report.failures, "\n".join(f"{case}\n{verdict.text}" for case, verdict in report.failures)
    assert report.never_compared(chosen) == []
    assert sum(report.kinds.values()) == len(chosen) > 8


def phase(stage: int, **more: Any) -> Phase:
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return Phase(stage=stage, zero=tuple(zero.items()), **more)


ADAM = {"optimizer": "AdamW", "accumulation": 2, "clip": 0.05}
DISK = {"offload_optimizer": "nvme", "offload_param": "nvme"}
KEPT = ("stage3_param_persistence_threshold", 0)
HYBRID = Phase(stage=3, world=4, zero=(KEPT, ("sharding_group", 2), ("hybrid_shard", True)))
IN_GROUPS = Phase(stage=3, world=4, zero=(KEPT, ("sharding_group", 2)))
MUST: dict[str, tuple[Case, str]] = {
    "everything on disk": (Case("net", **ADAM, phases=(phase(3, **DISK),)), EQUAL),
    "resumed elsewhere": (
        Case("tied layers", **ADAM, phases=(phase(3, offload_optimizer="cpu"), phase(1, world=3))),
        EQUAL,
    ),
    "resumed from one rank": (Case("frozen", **ADAM, phases=(phase(2, world=1), phase(3, world=3, **DISK))), EQUAL),
    "scalars, offloaded": (Case("scalars in units", **ADAM, phases=(phase(3, offload_optimizer="cpu"),)), EQUAL),
    "nothing to clip": (Case("empty alone", **ADAM, phases=(phase(2),)), EQUAL),
    "a bad batch, thrown away": (Case("net", way="drop by module", phases=(phase(3),)), EQUAL),
    "weights read without a root": (Case("no root, linear", phases=(phase(3),)), EQUAL),
    "experts by rank, whole": (Case("experts, by rank", phases=(phase(2),)), EQUAL),
    "experts by rank, sharded": (Case("experts, by rank", phases=(phase(3),)), EQUAL),
    "integers, resumed": (Case("integer parameters", **ADAM, phases=(phase(3), phase(1, world=1))), EQUAL),
    "a bad batch of submodules": (
        Case("submodules", way="drop by module", accumulation=2, phases=(phase(1),)),
        EQUAL,
    ),
    "loops, with an evaluation between": (Case("root, called", way="evaluate", phases=(phase(3),)), EQUAL),
    "in groups, on disk": (
        Case("net", **ADAM, phases=(phase(3, world=3, **DISK), dataclasses.replace(IN_GROUPS, **DISK))),
        EQUAL,
    ),
    "hybrid, whole matrices": (Case("net", optimizer="Adafactor", phases=(HYBRID, phase(2))), EQUAL),
    "hybrid, norms of parameters": (
        Case("net", optimizer="Lamb", block=True, phases=(HYBRID, phase(1, world=3))),
        EQUAL,
    ),
    "bf16": (Case("net", dtype="bf16", **ADAM, phases=(phase(3, world=3),)), EQUAL),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if n > 3 else []) for n, name in enumerate(MUST)]
)
def test_must_rows(name: str) -> None:
    case, kind = MUST[name]
    verdict = judge.judge(case)
    assert verdict.kind == kind, verdict.text


# ---------------------------------------------------------------- the fuzz test itself
def test_a_wrong_update_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a reference that clips a little differently, and one whose last step is missing."""
    case = Case("net", clip=0.05, phases=(phase(2),))
    other = dataclasses.replace(case, clip=0.0500001)
    monkeypatch.setattr(judge, "train_reference", lambda _: train_reference(other))
    verdict = judge.judge(case)
    assert verdict.kind == FAILED and "mismatch: rank 0: loss of step 1" in verdict.text


def test_errors_on_some_ranks_or_of_other_kinds_are_failures() -> None:
    case = Case("root, loop", phases=(phase(3),))
    said = "... hf_zero.gathered_params ..."
    right = [RankFailure(rank, "StateError", said, "", None) for rank in range(2)]
    inner = [RankFailure(rank, "AssertionError", f"rank {rank}", "", None) for rank in range(2)]

    def kind(outcomes: list[Any], hang: str = "") -> str | None:
        verdict = judge._errors(case, Ended(outcomes, hang, ""))
        return verdict and verdict.kind

    assert kind(right) == REFUSED
    assert kind(["a result", right[1]]) == kind(inner) == kind([right[0], inner[1]]) == FAILED
    gone = RankFailure(0, "DivergenceError", "... Another rank has stopped ...", "", None)
    assert kind([gone, right[1]]) == REFUSED
    assert kind([gone, gone]) == FAILED
    assert kind(right, hang="rank 1 did not end") == FAILED
    assert kind(["a result", "a result"]) is None


def test_cases_are_made_of_seed_and_number() -> None:
    several = [draw(3, number) for number in range(300)]
    assert several == [draw(3, number) for number in range(300)]
    assert {case.model for case in several} == set(MODELS)
    phases = [each for case in several for each in case.phases]
    assert {(p.stage, p.world) for p in phases} >= {(stage, world) for stage in range(4) for world in (1, 2, 3)}
    assert {(p.offload_optimizer, p.offload_param) for p in phases if p.stage == 3} == {
        (a, b) for a in ("none", "cpu", "nvme") for b in ("none", "cpu", "nvme")
    }
    assert len({case.optimizer for case in several}) == 11 and len({case.way for case in several}) == 11


def test_a_model_that_is_never_compared_is_reported() -> None:
    report = campaign.Report()
    report.count(Case("net"), judge.Verdict(EQUAL))
    report.count(Case("lstm"), judge.Verdict(REFUSED))
    assert report.never_compared(["net", "lstm", "gru"]) == ["lstm", "gru"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        pytest.param(["--list"], 0, "experts, by rank: local", marks=pytest.mark.slow),
        (["--only", "nothing"], 2, "--only 'nothing' is no model"),
        (["--replay", "7"], 2, "SEED:NUMBER is meant"),
        (["--shrink"], 2, "--shrink needs --replay"),
        (["--help"], 0, "--replay 7:123 --shrink"),
    ],
)
def test_the_command(arguments: list[str], status: int, said: str, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "fuzz.py"
    if arguments != ["--list"]:
        ran = run_script(script, *arguments, folder=tmp_path, processes=1)
        assert ran.status == [status] and said in ran.out + ran.err
        return
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == status and said in done.stdout + done.stderr
