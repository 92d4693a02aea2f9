"""Pictures of the recipes: lines and bars on white that differ in grey too, written as SVG, PNG or PDF.

from recipes.pictures import draw_curves

draw_curves(Path("losses.svg"), {"one process": losses, "stage 3": others}, title="Losses", smoothed=20)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour-blind readers can tell these colours of Okabe and Ito apart. In grey, patterns and widths differ.
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "linestyle": "-", "linewidth": 0.9},
    {"color": "#0072b2", "linestyle": "--", "linewidth": 1.6},
    {"color": "#d55e00", "linestyle": "-", "linewidth": 1.6},
    {"color": "#009e73", "linestyle": ":", "linewidth": 2.2},
    {"color": "#cc79a7", "linestyle": "-.", "linewidth": 1.6},
    {"color": "#7f7f7f", "linestyle": "-", "linewidth": 2.2},
    {"color": "#56b4e9", "linestyle": (0, (5, 1)), "linewidth": 2.2},
    {"color": "#e69f00", "linestyle": (0, (1, 1)), "linewidth": 2.6},
)
# Text stays text in an SVG, and its identifiers are the same in every run.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "hf_zero", "font.size": 9}


@contextlib.contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **arguments: Any) -> Iterator[list[Axes]]:
    """Give the axes of a new figure, row by row, and write it to `path` at the end.

    Args:
        arguments: Of `matplotlib.pyplot.subplots`, such as `figsize` in inches or `sharex`.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('Pictures need matplotlib: pip install "hf_zero[recipes]"') from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_STYLE):
        figure, grid = pyplot.subplots(
            rows, columns, squeeze=False, layout="constrained", facecolor="white", **arguments
        )
        for axes in grid.flat:
            axes.grid(color="#e4e4e4", linewidth=0.6)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        yield list(grid.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def smooth(values: Sequence[float], steps: int) -> NDArray[np.float64]:
    """Replace each value by the mean of itself and those before it, at most `steps` of them. The shape stays."""
    sums = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - steps, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def draw_curves(
    path: Path, curves: Mapping[str, Sequence[float]], *, title: str, ylabel: str = "loss", smoothed: int = 1
) -> None:
    """Draw a line for each name, whose values belong to the steps 1, 2, ...

    Args:
        curves: Name of a run -> its values, at most as many runs as there are LINES.
        smoothed: The number of steps over which means are drawn.
    """
    with picture(path, figsize=(8, 4.2)) as (axes,):
        for look, (name, values) in zip(LINES, curves.items(), strict=False):
            axes.plot(range(1, len(values) + 1), smooth(values, smoothed), label=name, **look)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.legend(frameon=False)
