"""DeepSpeed's import paths of optimizers: `hf_zero.deepspeed.ops.adam`."""
