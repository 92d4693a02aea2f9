"""The checks of smoke.py, one in each file."""
