"""Scores of held-out completions, their confidence intervals, and paired tests. Uses no reward function and no torch."""
