"""Rollouts: prompts as token ids in, completions as token ids with log-probabilities and finish reasons out.

`stop`, `include_stop_str_in_output` and `stop_token_ids` mean the same in every engine. This room knows nothing of rewards,
advantages or the files of a stage.
"""
