"""The user's optimizer on shards, and optimizers that torch does not have."""

from hf_zero.optim.cpu_adam import CPUAdam
from hf_zero.optim.lamb import Lamb
from hf_zero.optim.lion import Lion
from hf_zero.optim.muon import Muon
from hf_zero.optim.onebit import OneBitAdam
from hf_zero.optim.uncorrected_adam import UncorrectedAdam

__all__ = ["CPUAdam", "Lamb", "Lion", "Muon", "OneBitAdam", "UncorrectedAdam"]
