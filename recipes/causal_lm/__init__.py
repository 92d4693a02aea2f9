"""Fine-tune a causal language model with Trainer under ZeRO. README.md tells how to run it."""
