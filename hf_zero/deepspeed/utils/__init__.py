"""DeepSpeed's import paths over what hf_zero has under names of its own. New code takes hf_zero's names."""

from hf_zero.deepspeed.utils.logs import log_dist, logger

__all__ = ["log_dist", "logger"]
