"""Which rows are held out when no eval source is given: by a hash of the row, so a row never changes sides.

Not by position or shuffling: rows added or taken away elsewhere leave every other row where it is.
"""

import hashlib

import polars as pl


def held_out(prompt_id: str, *, fraction: float, seed: int) -> bool:
    """Whether the row is on the eval side; about `fraction` of all rows are, others for another seed."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:8], "big")
    return number < fraction * 2**64


def split_sides(prompt_ids: pl.Series, *, fraction: float, seed: int) -> pl.Series:
    """`train` or `eval` for each prompt id; rows without one (they are refused anyway) stay on the train side."""
    sides = ["eval" if one is not None and held_out(one, fraction=fraction, seed=seed) else "train" for one in prompt_ids]
    return pl.Series("side", sides, dtype=pl.String)
