"""The way in for transformers, TRL and accelerate code: arguments, Trainer, plugin, and `enable` for unmodified code."""
