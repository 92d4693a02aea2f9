"""Places of names that scripts know from DeepSpeed: `deepspeed.runtime.zero.NAME` becomes `hf_zero.runtime.zero.NAME`."""
