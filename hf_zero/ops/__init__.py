"""DeepSpeed's import paths of optimizers: `hf_zero.ops.adam`."""
