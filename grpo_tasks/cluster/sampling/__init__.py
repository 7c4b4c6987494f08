"""Completions for the lab and the evaluation, sampled on the nodes of a Ray cluster.

    spec.json -> shards of prompts --one at a time--> workers: `python -m grpo_tasks.rollout` -> parts -> samples.parquet

Every completion has a seed of its own, so who samples a shard does not matter. A shard whose node dies goes to another worker.
"""
