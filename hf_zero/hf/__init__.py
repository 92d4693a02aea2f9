"""The way in for transformers, TRL and accelerate: arguments, Trainer, plugin, and `enable` for unmodified code."""

from hf_zero.hf.versions import check_versions

check_versions("transformers", "accelerate")  # before an import of a name that other versions do not have
