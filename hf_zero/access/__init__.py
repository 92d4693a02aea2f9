"""Public reads and writes of sharded values."""
