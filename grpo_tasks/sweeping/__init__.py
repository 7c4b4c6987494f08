"""Sweeps: the grid of runs, what it costs, and its table."""
