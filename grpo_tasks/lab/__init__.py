"""The reward lab: every reward function is probed before any training."""
