"""DeepSpeed's names over hf_zero's own: `import hf_zero` in the place of `import deepspeed`."""
