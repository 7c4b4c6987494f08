"""Scores of held-out completions, their intervals and the paired test. Knows no reward function, no torch, no tracker."""
