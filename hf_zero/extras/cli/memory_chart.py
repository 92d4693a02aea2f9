"""`hf-zero estimate --plot` draws the peak of memory in a step, of a GPU and of a node's host, for every choice.

README's picture is made by this command:

    hf-zero estimate docs/images/llama-7b.json --gpus 8 --plot docs/images/memory_by_stage.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.errors import ConfigError
from hf_zero.estimate import Plan
from hf_zero.extras.cli.text import format_bytes, plural
from hf_zero.extras.estimate.choices import Choice, Hardware, Need

# The kinds of a plan, joined into those that a reader asks about. Each has one colour on every medium, of the
# Okabe-Ito palette, which colour-blind readers can tell apart, and a pattern for who sees grey. The last entry takes
# all other kinds.
_KINDS = {
    "parameters": {"color": "#0072B2"},
    "gradients": {"color": "#E69F00", "hatch": "////"},
    "master": {"color": "#009E73", "hatch": "...."},
    "optimizer": {"color": "#CC79A7"},
    "activations": {"color": "#999999", "hatch": "xxxx"},
    "gathered and buffers": {"color": "#56B4E9", "hatch": "||||"},
}
_LABELS = {"master": "master weights", "optimizer": "optimizer states"}
_TITLE = "Peak memory in a training step, as planned by hf-zero estimate"
# Text stays text in an SVG, whose identifiers are the same in every run.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "hf-zero", "font.size": 9}


def check_picture(path: Path) -> None:
    """Look before the long planning whether the picture can be drawn.

    Raises:
        ConfigError: matplotlib is missing.
        argparse.ArgumentError: The name of the file does not end in a format of pictures.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError(
            f"--plot draws with matplotlib, which cannot be imported ({error}): pip install matplotlib, "
            "or leave --plot out; --json prints the same numbers"
        ) from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise argparse.ArgumentError(None, f"--plot {path}: the name must end in one of .{', .'.join(sorted(known))}")


@dataclass(frozen=True)
class _Panel:
    """Bars of one memory, and what can be used of it."""

    title: str
    bars: Mapping[str, Mapping[str, int]]  # bytes by kind, for every name of a choice
    limit: Need | None


def draw(plans: Mapping[Choice, Plan], setting: str, hardware: Hardware, path: Path) -> None:
    """Write a picture with a bar for each plan and memory, and lines at what can be used of the memories.

    A choice that offloads to disk has no bar of its own: the device holds what it holds with the host in its place.

    Raises:
        ConfigError: The file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    shown = {_name(choice): plan for choice, plan in plans.items() if not choice.needs_disk}
    panels = list(_panels(shown, hardware))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6 + 3.6 * len(panels), 1.5 + 0.3 * len(shown)), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, panel)
        figure.axes[0].invert_yaxis()  # of both: they share it
        figure.suptitle(f"{_TITLE}\n{setting}", fontsize=9, x=0.01, ha="left")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}. Name another file.") from error


def _panels(plans: Mapping[str, Plan], hardware: Hardware) -> Iterator[_Panel]:
    """Make one panel for ranks on the CPU, whose device is the host, else one for each of the two memories."""
    limits = {need.of_device: need for need in hardware.needs(next(iter(plans.values())))}
    gpus = hardware.gpus
    if not hardware.on_host:
        device = {name: plan.device for name, plan in plans.items()}
        yield _Panel("GPU", device, limits.get(True))
    host = {
        name: {
            kind: gpus * (plan.host.get(kind, 0) + (plan.device.get(kind, 0) if hardware.on_host else 0))
            for kind in {**plan.device, **plan.host}
        }
        for name, plan in plans.items()
    }
    yield _Panel(f"host memory of a node, {plural(gpus, 'rank')}", host, limits.get(hardware.on_host))


def _draw_panel(axes: Any, panel: _Panel) -> None:
    names = list(panel.bars)
    left = [0.0] * len(names)
    for kind, look in _KINDS.items():
        sizes = [_gigabytes(bar, kind) for bar in panel.bars.values()]
        label = _LABELS.get(kind, kind)
        axes.barh(names, sizes, left=left, height=0.65, edgecolor="white", linewidth=0, label=label, **look)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # the line of the limit ends there
        text, place = format_bytes(total * 1e9) if total else "-", {"xytext": (4, 0), "textcoords": "offset points"}
        axes.annotate(text, (total, row), **place, va="center", weight="bold", bbox=ground, zorder=3)
    if panel.limit is not None:
        axes.axvline(panel.limit.usable / 1e9, color="black", linestyle="--", linewidth=1)
    limit = "" if panel.limit is None else f", limit {format_bytes(panel.limit.usable)}"
    axes.set_title(f"{panel.title}{limit}", fontsize=9, loc="left")
    axes.set_xlabel("GB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.18)


def _gigabytes(sizes: Mapping[str, int], kind: str) -> float:
    others = sum(size for name, size in sizes.items() if name not in _KINDS)
    return (sizes.get(kind, 0) if kind != "gathered and buffers" else others) / 1e9


def _name(choice: Choice) -> str:
    return f"stage {choice.stage}" + (f", {' and '.join(choice.offloaded)} on the CPU" if choice.offloaded else "")
