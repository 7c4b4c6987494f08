"""The policy: loading, log-probabilities of completions, adapters, merging.

Knows torch, transformers and peft; knows nothing of rewards, advantages, files of a stage, Prefect or MLflow.
Dimension letters throughout: P prompts, N completions, G completions per prompt, T completion tokens, S prompt tokens, C = S - 1
context tokens, M selected tokens, V vocabulary, H hidden size or query heads, K key-value heads, D head size.
"""
