"""`hf-zero profile`: runs an unmodified script, and shows what happened in chosen optimizer steps.

On several ranks: `hf-zero launch --num_gpus 2 --no_python hf-zero profile ...`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.errors import ConfigError, StateError
from hf_zero.extras.cli.text import count, format_bytes, plural
from hf_zero.extras.launcher.script import become, missing_script
from hf_zero.extras.pages.page import Section, page, table, write_page

if TYPE_CHECKING:
    from hf_zero.engine.engine import ZeroEngine
    from hf_zero.extras.monitors.step_trace import StepTrace

NAME = "profile"
SUMMARY = "run a training script and show what happened in a step: a page, and a trace for Perfetto"
EXAMPLES = """
hf-zero profile train.py --output_dir out
hf-zero profile --zero zero3.json --skip 5 --steps 1 --output profile train.py --output_dir out
"""
TRACE, PAGE = "trace-rank{rank}.json", "profile.html"
# Ranks in the page, which keeps it small; each rank has a trace.
_MAX_RANKS = 8
_MEMORY = {
    "parameters": "parameters",
    "master": "master weights",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "gathered_peak": "gathered at most",
    "gradients_peak": "unreduced gradients at most",
    "device": "on the device, between steps",
    "host": "on the host, between steps",
    "disk": "on disk, between steps",
}
_SERIES = {"parameters": "parameters", "master": "master", "optimizer": "optimizer", "gradients": "gradients"}


def steps_left_out(text: str) -> int:
    """An argument that is a whole number from 0."""
    return 0 if text.strip() == "0" else count(text)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=count, default=1, metavar="N", help="optimizer steps to record (default: 1)")
    add("--skip", type=steps_left_out, default=2, metavar="N", help="optimizer steps before them (default: 2)")
    add(
        "--output",
        type=Path,
        default=Path("profile"),
        metavar="DIR",
        help=f"for {PAGE}, and each rank's trace (default: profile)",
    )
    add("--zero", metavar="CONFIG", help="as for hf_zero.run: a file or JSON, for a script that names none itself")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    add(
        "script",
        metavar="SCRIPT",
        help="the script to run; on several ranks: hf-zero launch --num_gpus N --no_python hf-zero profile ...",
    )
    add("script_arguments", nargs=argparse.REMAINDER, metavar="...", help="handed on to it")


def run(args: argparse.Namespace) -> None:
    from hf_zero.engine.parts import register

    if problem := missing_script(args.script, is_module=args.module):
        raise argparse.ArgumentError(None, problem)
    _check_folder(args.output)
    if args.zero is not None:
        from hf_zero.hf.enable import enable

        enable(args.zero)
    profiling = Profiling(args)
    stop = register(profiling.trace)
    try:
        become(args.script, args.script_arguments, is_module=args.module)
    except SystemExit as left:  # what a script may end with; another status is its own
        if left.code not in (None, 0):
            raise
    finally:
        stop()
    profiling.check()


def _check_folder(folder: Path) -> None:
    """Make the folder before the script trains; raise ConfigError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder of --output {folder}: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write into --output {folder}: no permission")


class Profiling:
    """The profile of the first engine of a script that comes to the chosen steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._traces: list[StepTrace] = []
        self._is_done = False

    def trace(self, engine: ZeroEngine) -> StepTrace:
        from hf_zero.extras.monitors.step_trace import StepTrace

        file = None if self._is_done else self._args.output / TRACE.format(rank=engine.run_comm.run_rank)
        trace = StepTrace(engine, self._args.skip, self._args.steps, self._done, file)
        if engine.trains:
            self._traces.append(trace)
        return trace

    def check(self) -> None:
        """Raise StateError where the script has ended and nothing was recorded."""
        if self._is_done:
            return
        if not self._traces:
            raise StateError(
                f"{self._args.script} made no engine of hf_zero, so there is nothing to show: give hf-zero profile "
                "--zero zero3.json, or pass zero= to its TrainingArguments"
            )
        made, wanted = max(trace.updates for trace in self._traces), self._args.skip + self._args.steps
        raise StateError(
            f"{self._args.script} ended after {plural(made, 'optimizer step')}, and --skip {self._args.skip} --steps "
            f"{self._args.steps} needs {wanted}: lower them, or train longer"
        )

    def _done(self, engine: ZeroEngine, ranks: list[dict[str, Any]]) -> None:
        if self._is_done:
            return
        self._is_done = True
        for trace in self._traces:
            trace.trace = None  # the file is that of the engine that is shown
        if engine.run_comm.rank != 0:
            return
        folder = self._args.output
        text = page(f"Profile of {Path(self._args.script).name}", _facts(engine, ranks), _sections(engine, ranks))
        write_page(folder / PAGE, text)
        print(
            f"hf-zero profile: {folder / PAGE} ({format_bytes(len(text))}), and {folder / TRACE.format(rank='*')} "
            "for https://ui.perfetto.dev",
            flush=True,
        )


def _facts(engine: ZeroEngine, ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    step = ranks[0]["steps"][-1]
    numel = sum(flat.layout.numel for unit in engine.units for flat in unit.flats)
    return [
        ("model", f"{type(engine.module).__name__}, {numel / 1e6:,.2f} M parameters"),
        ("ZeRO stage", str(engine.config.stage)),
        ("ranks", f"{len(ranks)} on {engine.device.type}"),
        ("shown step", str(step["step"])),
        ("time of the step", f"{step['end_ms'] - step['start_ms']:,.0f} ms"),
        ("offloaded", _offloaded(engine)),
    ]


def _offloaded(engine: ZeroEngine) -> str:
    blocks = engine.config.zero.offloaded
    return ", ".join(f"{what} to {block.device}" for what, block in blocks.items()) or "nothing"


def _sections(engine: ZeroEngine, ranks: Sequence[Mapping[str, Any]]) -> list[Section]:
    from hf_zero.extras.estimate.account import plan_engine
    from hf_zero.extras.monitors.step_trace import units_of

    shown = [_shown_step(one) for one in ranks[:_MAX_RANKS]]
    units = units_of(engine)
    return [
        _timeline(shown, len(ranks)),
        _memory_over_step(ranks[0], shown[0]),
        _planned_and_measured(plan_engine(engine).report, ranks[0]["memory"]),
        _collectives(shown[0]["spans"]),
        *_units(units),
    ]


def _shown_step(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last step that a rank has recorded, with times from its start, and all that began after it."""
    step = one["steps"][-1]
    begin, end = step["start_ms"], step["end_ms"]
    spans = [
        {**span, "start_ms": round(span["start_ms"] - begin, 4)} for span in one["spans"] if begin <= span["start_ms"]
    ]
    # Work beside the host may be over later than the step.
    ms = max([end - begin, *(span["start_ms"] + span["ms"] for span in spans)])
    return {"rank": one["rank"], "ms": round(ms, 4), "spans": spans}


def joined(spans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Spans in the order of their starts; those of the same thing that overlap, as the buckets of a unit, are one."""
    found: list[dict[str, Any]] = []
    last: dict[tuple[str, str, str], dict[str, Any]] = {}
    for span in spans:
        key = span["lane"], span["name"], span["op"]
        before = last.get(key)
        end = span["start_ms"] + span["ms"]
        if before is not None and span["start_ms"] <= before["start_ms"] + before["ms"]:
            before["ms"] = round(max(before["start_ms"] + before["ms"], end) - before["start_ms"], 4)
            before["nbytes"] += span["nbytes"]
        else:
            found.append({name: span[name] for name in ("lane", "name", "start_ms", "ms", "nbytes")})
            last[key] = found[-1]
    return found


def _timeline(shown: list[dict[str, Any]], num_ranks: int) -> Section:
    from hf_zero.extras.monitors.spans import LANES

    note = "From the first forward to the end of the update. What a collective takes includes waiting for other ranks."
    note += " The buckets of a unit are one span here."
    if len(shown) < num_ranks:
        note += f" The first {len(shown)} of {num_ranks} ranks."
    ranks = [{**one, "spans": joined(one["spans"])} for one in shown]
    return {"kind": "timeline", "title": "One step", "note": note, "lanes": LANES, "ranks": ranks}


def _memory_over_step(one: Mapping[str, Any], shown: Mapping[str, Any]) -> Section:
    begin = one["steps"][-1]["start_ms"]
    samples = [sample for sample in one["samples"] if begin <= sample["at_ms"] <= begin + shown["ms"]]
    memory = one["memory"]
    still = [{"name": name, "values": [memory[kind]] * len(samples)} for kind, name in _SERIES.items()]
    moving = [
        {"name": "gathered", "values": [sample["gathered"] for sample in samples]},
        {"name": "unreduced gradients", "values": [sample["gradients"] for sample in samples]},
    ]
    return {
        "kind": "area",
        "title": "Memory over the step",
        "note": "Of rank 0, on all media: what stays between steps, and what comes and goes, without activations.",
        "ms": shown["ms"],
        "at_ms": [round(sample["at_ms"] - begin, 4) for sample in samples],
        "series": [one for one in [*still, *moving] if any(one["values"])],
    }


def _planned_and_measured(planned: Mapping[str, int], measured: Mapping[str, int]) -> Section:
    kinds = [kind for kind in _MEMORY if planned.get(kind) or measured[kind]]
    return {
        "kind": "pairs",
        "title": "Memory, planned beside measured",
        "note": "Of rank 0: what hf-zero estimate plans from sizes alone, and engine.memory_report() counts.",
        "rows": [{"name": _MEMORY[kind], "planned": planned.get(kind), "measured": measured[kind]} for kind in kinds],
    }


def _collectives(spans: Sequence[Mapping[str, Any]]) -> Section:
    rows: dict[str, list[Any]] = {}
    for span in spans:
        if span["op"]:
            row = rows.setdefault(span["op"], [span["op"], 0, 0, 0.0, 0.0])
            row[1] += 1
            row[2] += span["nbytes"]
            row[3] = round(row[3] + span["ms"], 4)
            row[4] = max(row[4], span["ms"])
    columns = [
        ("collective", "text"),
        ("calls", "count"),
        ("bytes", "bytes"),
        ("time, summed", "ms"),
        ("longest", "ms"),
    ]
    note = "Of rank 0 in the step, bytes of whole tensors. Times overlap with each other and with the computation."
    return table("Bytes per collective", columns, rows.values(), note)


def _units(units: list[dict[str, Any]]) -> list[Section]:
    note = "What is gathered and reduced together, as wide as it has elements. A persistent unit is never resharded."
    strip = {"kind": "strip", "title": "Units of the model", "note": note, "units": units}
    columns = [
        ("unit", "text"),
        ("kind", "text"),
        ("between uses", "text"),
        ("tensors", "count"),
        ("elements", "count"),
        ("padding", "count"),
        ("unsharded", "bytes"),
    ]
    rows = [
        (
            unit["name"] or "(root)",
            unit["kind"],
            "sharded" if unit["gathered"] else "unsharded",
            len(unit["parameters"]),
            unit["numel"],
            unit["padded_numel"] - unit["numel"],
            unit["bytes"],
        )
        for unit in units
    ]
    return [strip, table("Units in figures", columns, rows)]
