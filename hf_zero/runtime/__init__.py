"""Forward and backward: decides when parameters are unsharded and when gradients are reduced."""
