"""DeepSpeed's names over hf_zero's own: `import hf_zero` instead of `import deepspeed`."""
