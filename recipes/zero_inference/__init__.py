"""Let a language model in shards write text, without Trainer. README.md tells how to run it."""
