"""transformers' Trainer."""
