"""When parameters are unsharded and when gradients are reduced."""
