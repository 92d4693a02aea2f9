"""The user's optimizer on shards, optimizers that torch does not have, and DeepSpeed's learning-rate schedules."""

from hf_zero.optim.optimizers.cpu_adam import CPUAdam
from hf_zero.optim.optimizers.lamb import Lamb
from hf_zero.optim.optimizers.lion import Lion
from hf_zero.optim.optimizers.muon import Muon
from hf_zero.optim.optimizers.onebit import OneBitAdam
from hf_zero.optim.optimizers.uncorrected_adam import UncorrectedAdam
from hf_zero.optim.schedules.deepspeed import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

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
