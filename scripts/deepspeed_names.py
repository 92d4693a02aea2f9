"""Compares the public names of an installed DeepSpeed with those that hf_zero has, by module.

    python scripts/deepspeed_names.py             # names that are missing, module by module
    python scripts/deepspeed_names.py --write     # the table in docs/migrating-from-deepspeed.md

DeepSpeed need not share hf_zero's environment: PYTHONPATH=FOLDER adds one. Names of a module are the classes and
functions that were made in it, or below it, without an underscore, or those of DeepSpeed where it makes none. Modules
are those that programs import. A process of its own asks the facade: only one package can be called deepspeed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "migrating-from-deepspeed.md"
BEGIN, END = "<!-- names: scripts/deepspeed_names.py -->", "<!-- end of names -->"
MODULES = """deepspeed accelerator checkpoint checkpointing comm moe.layer monitor.monitor ops.adagrad ops.adam ops.aio
    ops.lamb ops.lion ops.op_builder ops.transformer pipe profiling.flops_profiler runtime.config runtime.dataloader
    runtime.engine runtime.lr_schedules runtime.pipe.topology runtime.utils runtime.zero.offload_config
    runtime.zero.partition_parameters runtime.zero.tiling utils utils.groups utils.logging utils.timer
    utils.z3_leaf_module utils.zero_to_fp32 zero""".split()
RENAMED, FACADE, REFUSED, MISSING = VERDICTS = ("renaming", "facade only", "refused", "missing")
SHOWN = 5  # missing names of a module in the table
Names = dict[str, list[str]]  # module -> its public names


def public_names() -> Names:
    """Return the public names of the installed DeepSpeed. Modules that this machine cannot import are left out."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    found = {}
    for path in MODULES:
        try:
            module = pkgutil.resolve_name("deepspeed" if path == "deepspeed" else f"deepspeed.{path}")
        except (ImportError, AttributeError) as error:
            print(f"{path} is left out: {error}", file=sys.stderr)
            continue
        public = {name: one for name, one in vars(module).items() if not name.startswith("_")}
        own = [name for name, one in public.items() if _is_made_in(one, module.__name__)]
        found[path] = sorted(own or [name for name, one in public.items() if _is_made_in(one, "deepspeed")])
    return found


def _is_made_in(value: Any, module: str) -> bool:
    return isinstance(value, type | FunctionType) and f"{value.__module__}.".startswith(f"{module}.")


def verdicts(names: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    """Return one of VERDICTS for every name, with the reason. `import deepspeed` is hf_zero here afterwards."""
    import hf_zero

    hf_zero.as_deepspeed()
    return {path: {name: _verdict(path, name) for name in mine} for path, mine in names.items()}


def _verdict(path: str, name: str) -> str:
    from hf_zero.extras.deepspeed.out_of_scope import refusal

    try:
        value = getattr(importlib.import_module("deepspeed" if path == "deepspeed" else f"deepspeed.{path}"), name)
    except NotImplementedError as error:
        return f"{REFUSED}: {error}"
    except (AttributeError, ModuleNotFoundError):
        return MISSING
    if (sentence := refusal(value)) is not None:
        return f"{REFUSED}: {sentence}"
    return RENAMED if _has(path, name) else FACADE


def _has(path: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module("hf_zero" if path == "deepspeed" else f"hf_zero.{path}"), name)
    except ModuleNotFoundError:
        return False


def table(found: Mapping[str, Mapping[str, str]], version: str) -> str:
    """Return counts by module, the names that are missing, and what to use instead of those that are refused."""
    total = {verdict: sum(_count(mine, verdict) for mine in found.values()) for verdict in VERDICTS}
    lines = [
        f"Public names of DeepSpeed {version} ({datetime.date.today()}), in the modules that programs import: "
        f"{total[RENAMED]} work by renaming, {total[FACADE]} under the facade only, {total[REFUSED]} are refused with "
        f"what to use instead, {total[MISSING]} are missing.",
        "",
        "| module | " + " | ".join(VERDICTS) + " | missing names, and what to use instead of refused ones |",
        "|---|" + "---|" * (len(VERDICTS) + 1),
    ]
    for path, mine in found.items():
        counts = [str(_count(mine, verdict) or "") for verdict in VERDICTS]
        missing = [f"`{name}`" for name, one in mine.items() if one == MISSING]
        more = [f"and {len(missing) - SHOWN} more"] if len(missing) > SHOWN else []
        instead = dict.fromkeys(one.partition(": use ")[2].rstrip(".") for one in mine.values() if ": use " in one)
        lines.append(f"| `{path}` | {' | '.join(counts)} | {'; '.join([*missing[:SHOWN], *more, *instead])} |")
    return "\n".join(lines)


def _count(mine: Mapping[str, str], verdict: str) -> int:
    return sum(one.partition(":")[0] == verdict for one in mine.values())


def _asked_elsewhere(names: Names) -> dict[str, dict[str, str]]:
    ended = subprocess.run(
        [sys.executable, __file__, "--verdicts"], input=json.dumps(names), capture_output=True, text=True, check=True
    )
    answer: dict[str, dict[str, str]] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def _rows_of(found: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for path, mine in found.items():
        for name, verdict in mine.items():
            if verdict != RENAMED:
                yield f"{path}.{name}: {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into the document")
    parser.add_argument("--verdicts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.verdicts:
        print(json.dumps(verdicts(json.load(sys.stdin))))
        return
    found = _asked_elsewhere(public_names())
    if options.write:
        before, rest = DOCUMENT.read_text().split(BEGIN)
        text = table(found, importlib.metadata.version("deepspeed"))
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    else:
        print("\n".join(_rows_of(found)))


if __name__ == "__main__":
    main()
