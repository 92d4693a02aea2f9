"""A picture of what each stage computed when, from the times of a batch: the figures of the pipeline papers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.pictures import picture

# Forward, backward, and the two halves of a split backward, as in the papers' figures.
COLOURS = {"F": "#4c78a8", "B": "#59a14f", "I": "#8cd17d", "W": "#f1ce63"}
_LEAST_SHARE = 0.01  # of the width, which a number needs
_PALE = 0.65  # opacity
MEANING = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def draw(report: Mapping[str, Any], title: str, path: Path) -> None:
    """Write `engine.schedule_report()` as an SVG, PNG or PDF, by the name of the file. A row for each stage."""
    stages = report["stages"]
    kinds: dict[str, None] = {}  # in the order in which they come
    with picture(path, figsize=(12, 1.2 + 0.6 * len(stages))) as (axes,):
        from matplotlib.patches import Patch

        for row, stage in enumerate(stages):
            for name, start, end in stage["actions"]:
                kind, (micro, _, chunk) = name[0], name[1:].partition(".")
                kinds[kind if not chunk else "chunk"] = None
                axes.barh(
                    row, 1e3 * (end - start), left=1e3 * start, height=0.86, color=COLOURS[kind], edgecolor="white",
                    alpha=_PALE if chunk else 1.0, linewidth=0.6,
                )  # fmt: skip
                if end - start > _LEAST_SHARE * report["seconds"]:
                    axes.text(500 * (start + end), row, str(int(micro) + 1), ha="center", va="center", fontsize=8)
        axes.set_yticks(range(len(stages)), [f"stage {row}" for row in range(len(stages))])
        axes.invert_yaxis()
        axes.set_xlim(0, 1e3 * report["seconds"])
        axes.set_xlabel("ms; numbers are those of micro-batches")
        idle, bubble = f"{report['idle_share']:.0%}", f"{report['bubble_share']:.0%}"
        axes.set_title(f"{title}: idle {idle} of the time, {bubble} by the formula", fontsize=10, loc="left")
        shown = [Patch(color=COLOURS[kind], label=MEANING[kind]) for kind in kinds if kind in COLOURS]
        if "chunk" in kinds:
            shown.append(Patch(color="grey", alpha=_PALE, label="pale: a further chunk of layers of the stage"))
        axes.legend(handles=shown, ncols=5, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1))
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
