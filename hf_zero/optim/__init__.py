"""The user's optimizer on shards, an Adam for parameters in CPU memory, and DeepSpeed's learning-rate schedules."""

from hf_zero.optim.cpu_adam import CPUAdam
from hf_zero.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["CPUAdam", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
