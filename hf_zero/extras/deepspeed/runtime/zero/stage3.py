"""What scripts import from deepspeed.runtime.zero.stage3: see estimate/deepspeed_formulas.py."""

from hf_zero.extras.estimate.deepspeed_formulas import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

__all__ = [
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]
