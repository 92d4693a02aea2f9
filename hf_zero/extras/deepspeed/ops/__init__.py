"""DeepSpeed's import paths of optimizers: `hf_zero.extras.deepspeed.ops.adam`."""
