"""Which rows are held out when the config names no eval source: decided by a hash of the row, so a row never changes its split.

Not by position and not by shuffling: rows that are added or removed leave the split of every other row unchanged.
"""

import hashlib

import polars as pl


def is_held_out(prompt_id: str, *, fraction: float, seed: int) -> bool:
    """Whether the row is in the eval split; about `fraction` of all rows are. Another seed holds out other rows."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:8], "big")
    return number < fraction * 2**64


def assign_splits(prompt_id: pl.Series, *, fraction: float, seed: int) -> pl.Series:
    """`train` or `eval` for each prompt_id; rows without one stay in the train split and are refused anyway."""
    splits = ["eval" if one is not None and is_held_out(one, fraction=fraction, seed=seed) else "train" for one in prompt_id]
    return pl.Series("split", splits, dtype=pl.String)
