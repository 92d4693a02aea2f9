"""What scripts import from deepspeed.runtime.utils."""

from hf_zero.engine.memory_usage import see_memory_usage

__all__ = ["see_memory_usage"]
