"""Optimizer states in host memory or on disk."""
