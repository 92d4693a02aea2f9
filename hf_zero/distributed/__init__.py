"""Processes, groups, collectives, and how ranks hear of each other's failures."""
