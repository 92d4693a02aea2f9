"""A picture of what each stage computed when, from the times of a batch: the figures of the pipeline papers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Forward, backward, and the two halves of a split backward, as in the papers' figures.
COLOURS = {"F": "#4c78a8", "B": "#59a14f", "I": "#8cd17d", "W": "#f1ce63"}
_LEAST_SHARE = 0.01  # of the width, which a number needs
MEANING = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def draw(report: Mapping[str, Any], title: str, path: Path) -> None:
    """Write `engine.schedule_report()` as an SVG, PNG or PDF, by the name of the file. A row for each stage."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('--picture needs matplotlib: pip install "hf_zero[recipes]"') from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    stages = report["stages"]
    figure, axes = pyplot.subplots(figsize=(12, 1.2 + 0.6 * len(stages)), layout="constrained")
    seen: dict[str, Any] = {}
    for row, stage in enumerate(stages):
        for name, start, end in stage["actions"]:
            kind, (micro, _, chunk) = name[0], name[1:].partition(".")
            bars = axes.barh(
                row, 1e3 * (end - start), left=1e3 * start, height=0.86, color=COLOURS[kind], edgecolor="white",
                alpha=0.65 if chunk else 1.0, linewidth=0.6,
            )  # fmt: skip
            seen.setdefault(kind, bars)
            if end - start > _LEAST_SHARE * report["seconds"]:
                axes.text(500 * (start + end), row, str(int(micro) + 1), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(stages)), [f"stage {row}" for row in range(len(stages))])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * report["seconds"])
    axes.set_xlabel("ms")
    idle, bubble = f"{report['idle_share']:.0%}", f"{report['bubble_share']:.0%}"
    axes.set_title(f"{title}: idle {idle} of the time, {bubble} by the formula", fontsize=10, loc="left")
    axes.legend(
        seen.values(), [MEANING[kind] for kind in seen], ncols=4, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1)
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
