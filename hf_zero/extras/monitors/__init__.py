"""Monitors and profilers: what a run writes and logs of itself. An engine meets them as parts (engine/parts.py)."""
