"""Rollouts: prompts as token ids in, completions as token ids with log-probabilities and finish reasons out.

Every engine means the same by `stop`, `include_stop_str_in_output` and `stop_token_ids`. Rewards, advantages and files of a
stage are none of its business.
"""
