"""Draws the memory of one rank by ZeRO stage, as an SVG picture, from the answer of `hf-zero estimate MODEL --json`.

    python scripts/draw_memory.py docs/images/llama-7b.json --gpus 8 --out docs/images/memory_by_stage.svg

Each bar is the peak of the device's memory in one training step, split by what occupies it. No plotting library is
needed.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_zero.extras.cli.main import main as hf_zero_command

# Kinds of the plan, joined into those that a reader asks about; colours of the Okabe-Ito palette, which colour-blind
# readers can tell apart.
KINDS = (
    ("parameters", ("parameters",), "#0072B2"),
    ("gradients", ("gradients",), "#E69F00"),
    ("master weights", ("master",), "#009E73"),
    ("optimizer states", ("optimizer",), "#CC79A7"),
    ("activations", ("activations",), "#999999"),
    ("gathered and buffers", None, "#56B4E9"),  # all other kinds
)
# (label, stage, optimizer on, parameters on)
ROWS = (
    ("stage 0 (nothing sharded)", 0, "none", "none"),
    ("stage 1", 1, "none", "none"),
    ("stage 2", 2, "none", "none"),
    ("stage 3", 3, "none", "none"),
    ("stage 2, optimizer on the CPU", 2, "cpu", "none"),
    ("stage 3, all on the CPU", 3, "cpu", "cpu"),
)
WIDTH, LEFT, RIGHT, TOP = 860, 230, 110, 120
BAR, GAP = 26, 14
LEGEND_COLUMNS = 3


def plan(model: str, gpus: int) -> dict[str, Any]:
    """The answer of `hf-zero estimate` as a dict."""
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        status = hf_zero_command(["estimate", model, "--gpus", str(gpus), "--json"])
    if status:
        raise SystemExit(status)
    parsed: dict[str, Any] = json.loads(answer.getvalue())
    return parsed


def split(device: Mapping[str, int]) -> list[int]:
    """Bytes by entry of KINDS."""
    named = {kind for _, kinds, _ in KINDS for kind in kinds or ()}
    rest = sum(size for kind, size in device.items() if kind not in named)
    return [rest if kinds is None else sum(device.get(kind, 0) for kind in kinds) for _, kinds, _ in KINDS]


def find(choices: Sequence[Mapping[str, Any]], stage: int, optimizer: str, param: str) -> Mapping[str, Any]:
    wanted = (stage, optimizer, param)
    return next(entry for entry in choices if (entry["stage"], entry["optimizer"], entry["param"]) == wanted)


def draw(answer: Mapping[str, Any]) -> str:
    """The picture as SVG text."""
    rows = [(label, find(answer["choices"], *choice)["device"]) for label, *choice in ROWS]
    most = max(sum(device.values()) for _, device in rows)
    scale = (WIDTH - LEFT - RIGHT) / most
    height = TOP + len(rows) * (BAR + GAP) + 10
    title = "Peak memory of one GPU in a training step, as planned by hf-zero estimate"
    setting = (
        f"{answer['model']}, {answer['parameters'] / 1e9:.1f} B parameters, {answer['world_size']} GPUs, "
        f"bf16, AdamW, {answer['batch_size']} x {answer['sequence_length']} tokens per GPU"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(16, 26, title, size=15, weight="bold"),
        text(16, 46, setting),
        *legend(),
    ]
    for number, (label, device) in enumerate(rows):
        top = TOP + number * (BAR + GAP)
        parts.append(text(LEFT - 12, top + BAR * 0.68, label, anchor="end"))
        left = float(LEFT)
        for size, (_, _, colour) in zip(split(device), KINDS, strict=True):
            width = size * scale
            if size:
                parts.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            left += width
        parts.append(text(left + 8, top + BAR * 0.68, f"{sum(device.values()) / 1e9:.0f} GB", weight="bold"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def legend() -> list[str]:
    parts = []
    for number, (name, _, colour) in enumerate(KINDS):
        left = LEFT + (number % LEGEND_COLUMNS) * 190
        top = 62 + (number // LEGEND_COLUMNS) * 22
        parts.append(f'<rect x="{left}" y="{top}" width="13" height="13" fill="{colour}"/>')
        parts.append(text(left + 20, top + 11, name))
    return parts


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 13, weight: str = "normal") -> str:
    where = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text {where} fill="#222222">{html.escape(words)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder or a config.json; weights are not needed")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="ranks (default: 8)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the SVG file to write")
    args = parser.parse_args()
    args.out.write_text(draw(plan(args.model, args.gpus)))
    print(args.out)


if __name__ == "__main__":
    main()
