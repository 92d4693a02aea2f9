"""Train LoRA adapters of a language model in shards. README.md tells how to run it."""
