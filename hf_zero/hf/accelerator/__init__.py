"""Accelerate's Accelerator."""
