"""The ways in which an optimizer updates shards."""
