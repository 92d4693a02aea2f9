"""The user's optimizer on shards, optimizers that torch does not have, and DeepSpeed's learning-rate schedules."""

from hf_zero.optim.cpu_adam import CPUAdam
from hf_zero.optim.lamb import Lamb
from hf_zero.optim.lion import Lion
from hf_zero.optim.muon import Muon
from hf_zero.optim.onebit import OneBitAdam
from hf_zero.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from hf_zero.optim.uncorrected_adam import UncorrectedAdam

__all__ = [
    "CPUAdam",
    "LRRangeTest",
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneCycle",
    "UncorrectedAdam",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]
