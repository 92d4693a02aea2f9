"""Random settings and overflow patterns for loss scalers, and DeepSpeed's answers to them.

    python tests/golden/loss_scales.py        # with DeepSpeed installed: writes loss_scales.json beside this file

The file holds one digest for each block of patterns: of the scale after every step, in DeepSpeed's DynamicLossScaler,
or of "minimum" where that raises. The first lines of this file need nothing but Python: the test imports them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCKS, PATTERNS = 100, 50
FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Pattern:
    power: int
    window: int
    hysteresis: int
    consecutive: bool
    min_scale: int
    overflows: tuple[bool, ...]


def patterns(block: int) -> Iterator[Pattern]:
    draw = random.Random(block)
    for _ in range(PATTERNS):
        rate = draw.choice([0.02, 0.1, 0.4, 0.9])
        yield Pattern(
            power=draw.randrange(1, 33),
            window=draw.choice([1, 2, 3, 7, 20]),
            hysteresis=draw.randrange(1, 5),
            consecutive=draw.random() < 0.5,
            min_scale=draw.choice([1, 1, 2]),
            overflows=tuple(draw.random() < rate for _ in range(draw.randrange(20, 120))),
        )


def digest(block: int, trace: Callable[[Pattern], list[float | str]]) -> str:
    """Return the digest of the traces of all patterns in a block."""
    return hashlib.sha256(repr([trace(pattern) for pattern in patterns(block)]).encode()).hexdigest()[:16]


def _deepspeed_trace(pattern: Pattern) -> list[float | str]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=2**pattern.power,
        scale_window=pattern.window,
        min_scale=pattern.min_scale,
        delayed_shift=pattern.hysteresis,
        consecutive_hysteresis=pattern.consecutive,
    )
    trace: list[float | str] = []
    for overflow in pattern.overflows:
        try:
            scaler.update_scale(overflow)
        except Exception as error:
            assert "already at minimum" in str(error)
            return [*trace, "minimum"]
        trace.append(float(scaler.cur_scale))
    return trace


if __name__ == "__main__":
    import logging
    import os

    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29617",
    }
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    logging.disable(logging.CRITICAL)
    digests = [digest(block, _deepspeed_trace) for block in range(BLOCKS)]
    FILE.write_text(json.dumps({"deepspeed": deepspeed.__version__, "digests": digests}, indent=1) + "\n")
