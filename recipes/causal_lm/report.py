"""Compares a run with its resumed second half, and tells at the end what was done and where it lies.

    python -m recipes.causal_lm.report resume FIRST RESUMED       exit status 1 where a loss differs
    python -m recipes.causal_lm.report table FIRST RESUMED CONSOLIDATED

FIRST and RESUMED are output folders of train.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from recipes.causal_lm.reporting import SUMMARY, perplexity


def load_summary(folder: Path) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SystemExit(f"{folder} holds no {SUMMARY}: train.py writes it when it has finished.") from None
    return summary


def loss_pairs(first: dict[str, Any], resumed: dict[str, Any]) -> list[tuple[int, float, float]]:
    """(step, loss, loss after resuming) for the steps that the resumed run did."""
    losses = {entry["step"]: entry["loss"] for entry in first["steps"]}
    # A resumed run's log begins with what the checkpoint brought along; only the steps after it were computed again.
    start = resumed["max_steps"] - resumed["steps_run"]
    pairs = [
        (entry["step"], losses[entry["step"]], entry["loss"]) for entry in resumed["steps"] if entry["step"] > start
    ]
    if len(pairs) != resumed["steps_run"] or not pairs:
        raise SystemExit(
            f"The resumed run logged {len(pairs)} of its {resumed['steps_run']} steps: use --logging_steps 1."
        )
    return pairs


def show_resume(first: Path, resumed: Path) -> int:
    """Print the losses side by side; return the exit status."""
    pairs = loss_pairs(load_summary(first), load_summary(resumed))
    print(f"{'step':>6}  {'first run':>9}  {'resumed':>9}  {'difference':>10}")
    for step, loss, again in pairs:
        print(f"{step:>6}  {loss:>9.4f}  {again:>9.4f}  {abs(loss - again):>10.1e}")
    differing = sum(loss != again for _, loss, again in pairs)
    if differing:
        print(f"{differing} of {len(pairs)} losses DIFFER after resuming.")
        return 1
    print(f"All {len(pairs)} losses after resuming are equal to the first run's, to the last bit.")
    return 0


def show_table(first: Path, resumed: Path, consolidated: Path) -> None:
    run, again = load_summary(first), load_summary(resumed)
    worst = max(abs(loss - other) for _, loss, other in loss_pairs(run, again))
    rows = [
        ("model", f"{run['model']} ({run['layers']} layers, {run['parameters'] / 1e6:.1f} M parameters)"),
        ("text", run["dataset"]),
        ("ZeRO", f"{run['zero']}, {run['world_size']} processes on {run['device'].split(':')[0]}"),
        ("steps", f"{run['steps_run']}, and {again['steps_run']} of them again after resuming"),
        ("step time", f"{run['step_time_s']:.2f} s (median)"),
        ("training time", f"{run['training_s']:.0f} s, resumed {again['training_s']:.0f} s"),
        ("peak memory, rank 0", _size(run["peak_memory_bytes_rank_0"])),
        *_evaluation_rows(run),
        ("resume", f"largest difference of a loss: {worst:.1e}"),
        *[
            ("checkpoint", f"{path} ({_size(_folder_bytes(Path(path)))})")
            for path in run["checkpoints"]
            if Path(path).is_dir()  # the quickstart keeps the last one
        ],
        ("consolidated", f"{consolidated} ({_size(_folder_bytes(consolidated))}): from_pretrained() loads it"),
        ("losses and times", f"{first / SUMMARY}"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def _evaluation_rows(run: dict[str, Any]) -> list[tuple[str, str]]:
    before, after = run["eval_loss_before"], run["eval_loss_after"]
    if before is None or after is None:
        return []
    return [
        ("evaluation loss", f"{before:.4f} before, {after:.4f} after"),
        ("perplexity", f"{perplexity(before):.4g} before, {perplexity(after):.4g} after"),
    ]


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a run with its resumed half; tell what was done.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, folders in (("resume", ["first", "resumed"]), ("table", ["first", "resumed", "consolidated"])):
        subparser = commands.add_parser(command)
        for folder in folders:
            subparser.add_argument(folder, type=Path)
    args = parser.parse_args()
    if args.command == "resume":
        return show_resume(args.first, args.resumed)
    show_table(args.first, args.resumed, args.consolidated)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
