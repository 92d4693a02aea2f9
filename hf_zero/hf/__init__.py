"""The way in for transformers, TRL and accelerate: arguments, Trainer, plugin, and `enable` for unmodified code."""
