"""`hf-zero estimate --plot` draws the peak of a rank's device memory in a step, for every stage and offload choice.

README's picture is made by this command:

    hf-zero estimate docs/images/llama-7b.json --gpus 8 --plot docs/images/memory_by_stage.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from hf_zero.errors import ConfigError
from hf_zero.estimate import Plan
from hf_zero.extras.cli.text import format_bytes
from hf_zero.extras.estimate.choices import Choice, Hardware

# The kinds of a plan, joined into those that a reader asks about, in colours of the Okabe-Ito palette, which
# colour-blind readers can tell apart. The last entry takes all other kinds.
_KINDS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "master": "#009E73",
    "optimizer": "#CC79A7",
    "activations": "#999999",
    "gathered and buffers": "#56B4E9",
}
_LABELS = {"master": "master weights", "optimizer": "optimizer states"}
_TITLE = "Peak memory of one device in a training step, as planned by hf-zero estimate"
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


def draw(plans: Mapping[Choice, Plan], setting: str, hardware: Hardware, path: Path) -> None:
    """Write a picture with a bar for each plan, and a line at the memory that `hardware` leaves to a rank.

    A choice that offloads to disk has no bar of its own: the device holds what it holds with the host in its place.

    Raises:
        ConfigError: The file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    shown = {
        _name(choice): plan
        for choice, plan in plans.items()
        if not any(medium.needs_folder for medium in choice.offloaded.values())
    }
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, 1.3 + 0.3 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        left = [0.0] * len(shown)
        for kind, colour in _KINDS.items():
            sizes = [_gigabytes(plan, kind) for plan in shown.values()]
            axes.barh(list(shown), sizes, left=left, height=0.65, color=colour, label=_LABELS.get(kind, kind))
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        for row, total in enumerate(left):
            axes.text(total, row, f" {format_bytes(total * 1e9)}", va="center", weight="bold")
        if (limit := _limit(next(iter(shown.values())), hardware)) is not None:
            axes.axvline(limit, color="black", linestyle="--", linewidth=1, label=f"limit {format_bytes(limit * 1e9)}")
        axes.invert_yaxis()
        axes.set_title(f"{_TITLE}\n{setting}", fontsize=9, loc="left")
        axes.set_xlabel("GB")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.1)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}. Name another file.") from error


def _gigabytes(plan: Plan, kind: str) -> float:
    others = sum(size for name, size in plan.device.items() if name not in _KINDS)
    return (plan.device.get(kind, 0) if kind != "gathered and buffers" else others) / 1e9


def _limit(plan: Plan, hardware: Hardware) -> float | None:
    """The usable memory of a rank's device in GB; None where it is not known."""
    if not hardware.on_host and hardware.gpu_memory is None:
        return None
    return next((need.usable / need.ranks / 1e9 for need in hardware.needs(plan)), None)


def _name(choice: Choice) -> str:
    return f"stage {choice.stage}" + (f", {' and '.join(choice.offloaded)} on the CPU" if choice.offloaded else "")
