"""Starts the processes of a job from a DeepSpeed launch line: by a torchrun agent here, or one on each host."""
