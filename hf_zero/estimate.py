"""The memory that a training will need: DeepSpeed's formulas, and plans made by the engine's own code.

`plan_model` gives the bytes of one rank by kind and medium; `measure` the activations that it needs for that. Neither
needs processes, weights or a device: everything runs on the meta device.
"""

from __future__ import annotations

from hf_zero.extras.estimate.deepspeed_formulas import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from hf_zero.extras.estimate.plan import Plan, plan_model
from hf_zero.extras.estimate.profile import Profile, measure

__all__ = [
    "Plan",
    "Profile",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "measure",
    "plan_model",
]
