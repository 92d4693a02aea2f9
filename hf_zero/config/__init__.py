"""The configuration: DeepSpeed's JSON schema, read strictly and resolved against arguments, model and world size."""

from hf_zero.config.cross_checks import COLLECTIVES
from hf_zero.config.problems import Problem
from hf_zero.config.resolved import (
    CheckpointSection,
    CometSection,
    CommsLoggerSection,
    FlopsProfilerSection,
    MonitorSection,
    OffloadOptimizer,
    OffloadParam,
    ResolvedConfig,
    WandbSection,
    ZeroSection,
)
from hf_zero.config.zero_config import ZeroConfig

__all__ = [
    "COLLECTIVES",
    "CheckpointSection",
    "CometSection",
    "CommsLoggerSection",
    "FlopsProfilerSection",
    "MonitorSection",
    "OffloadOptimizer",
    "OffloadParam",
    "Problem",
    "ResolvedConfig",
    "WandbSection",
    "ZeroConfig",
    "ZeroSection",
]
