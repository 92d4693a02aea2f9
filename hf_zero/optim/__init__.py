"""The user's optimizer on shards."""
