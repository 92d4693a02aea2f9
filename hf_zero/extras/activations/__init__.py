"""Checkpointed activations: where the inputs that a recomputation needs are kept between forward and backward."""
