"""ZeroEngine: the step loop and the parts it owns."""
