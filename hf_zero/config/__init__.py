"""The configuration: DeepSpeed's JSON schema, read strictly and resolved against arguments, model and world size."""

from hf_zero.config.cross_checks import COLLECTIVES
from hf_zero.config.problems import Problem
from hf_zero.config.resolved import (
    CheckpointSection,
    CommsLoggerSection,
    FlopsProfilerSection,
    OffloadOptimizer,
    OffloadParam,
    ResolvedConfig,
    ZeroSection,
)
from hf_zero.config.zero_config import ZeroConfig

__all__ = [
    "COLLECTIVES",
    "CheckpointSection",
    "CommsLoggerSection",
    "FlopsProfilerSection",
    "OffloadOptimizer",
    "OffloadParam",
    "Problem",
    "ResolvedConfig",
    "ZeroConfig",
    "ZeroSection",
]
