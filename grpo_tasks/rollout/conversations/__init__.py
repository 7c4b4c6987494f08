"""Completions of several turns: the policy and what answers it, joined as the exact token ids that were sampled and said."""
