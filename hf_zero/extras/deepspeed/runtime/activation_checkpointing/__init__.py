"""Where scripts find what they know from DeepSpeed's package of this name, with `hf_zero` for `deepspeed`."""
