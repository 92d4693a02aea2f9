"""The user's optimizer on shards, and an Adam for parameters in CPU memory."""

from hf_zero.optim.cpu_adam import CPUAdam

__all__ = ["CPUAdam"]
