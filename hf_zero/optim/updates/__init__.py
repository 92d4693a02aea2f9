"""How an optimizer updates shards."""
