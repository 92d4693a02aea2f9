"""FP8 training by the levels of MS-AMP: `hf_zero.fp8.initialize` for plain loops, the `msamp` block for all others."""

from __future__ import annotations

from hf_zero.lazy import lazy_names

__getattr__ = lazy_names(__name__, {"initialize": "hf_zero.engine.plain_fp8"})


def __dir__() -> list[str]:
    return ["initialize"]
