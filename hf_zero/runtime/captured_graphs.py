"""CUDA graphs: kernels that are recorded once, with the addresses of their tensors, and replayed without Python.

A replay runs no hooks: gradients would stay where they are, and at stage 3 weights would be read from addresses that
others have by then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_zero.errors import StateError

# torch.compile's modes that record graphs of what they compile.
RECORDING_MODES = ("reduce-overhead", "max-autotune")
REMEDY = (
    'Use mode "default" or "max-autotune-no-cudagraphs", which compile the same kernels and record no CUDA graph; or '
    "stage 2, where parameters stay where they are."
)


def recording_problem(mode: str | None, *, shards_parameters: bool) -> str:
    """Return why torch.compile's `mode` cannot go with an engine; empty if it can."""
    if not shards_parameters or mode not in RECORDING_MODES:
        return ""
    return (
        f"torch.compile's mode {mode!r} records CUDA graphs, in which the addresses of weights are fixed: at stage 3 "
        "weights are gathered into other memory at every use."
    )


class CaptureWatch:
    """Raises where a graph of an engine's model is being recorded on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._is_capturing: Callable[[], bool] | None = None
        if device.type != "cpu" and torch.accelerator.is_available():
            self._is_capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)

    def check(self, rank: int) -> None:
        """Raise StateError if a graph is being recorded. Call before a forward; takes no time of the device."""
        if self._is_capturing is not None and self._is_capturing():
            raise StateError(
                f"rank {rank}: a CUDA graph is being recorded, and a forward of an engine's model cannot be part of "
                "it: a replay would run neither its gathers nor its reductions.\nRecord graphs of other models only, "
                "or call engine.teardown() first, which leaves the plain model."
            )
