"""Checkpoints of other tools, to and from those of hf_zero. `hf-zero convert` is thin over it."""
