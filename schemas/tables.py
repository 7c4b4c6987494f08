"""Columns of the tables on disk, and the pandera models that hold them.

    RAW -> (verdict) -> PROMPTS + QUARANTINE      PROMPTS -> SAMPLES -> (scores)

`prompt_id` is the first 16 hex digits of the SHA-256 of (messages, answer); with `sample` (or stage, step and sample in a stage's
completions) it names a completion in every table. pandera is imported here and nowhere in schemas/ besides.
"""

import pandera.polars as pa
import polars as pl

MESSAGES = pl.List(pl.Struct({"role": pl.String, "content": pl.String}))


class Prompts(pa.DataFrameModel):
    """Accepted rows of one side."""

    prompt_id: str = pa.Field(str_matches=r"^[0-9a-f]{16}$")
    source: str
    """File or hub id, as written in the config."""
    line: int = pa.Field(ge=1)
    """Line in the file (JSONL), or row number counted from 1."""
    prompt: pl.List = pa.Field(dtype_kwargs={"inner": MESSAGES.inner})
    answer: str = pa.Field(str_length={"min_value": 1})
    """Ground truth, normalised."""
    prompt_tokens: int = pa.Field(ge=1)
    extra: str
    """Other columns of the row as one JSON object; reward functions get them as keyword arguments."""

    class Config:
        strict = True


class Samples(pa.DataFrameModel):
    """Completions of one model for held-out prompts."""

    prompt_id: str
    sample: int = pa.Field(ge=-1)
    """0 .. num_samples - 1; -1 for the greedy completion."""
    completion: str
    completion_tokens: int = pa.Field(ge=0)
    finish_reason: str = pa.Field(isin=["stop", "length"])

    class Config:
        strict = False
