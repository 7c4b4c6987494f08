"""The policy: loading, token ids of a chat, log-probabilities of completions, adapters, merging.

Knows torch, transformers and peft; knows nothing of rewards, advantages, files of a stage, Prefect or MLflow.
Dimension letters used throughout: P prompts, N completions, T completion tokens, S prompt tokens, V vocabulary, H hidden.
"""
