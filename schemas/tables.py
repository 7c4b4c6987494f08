"""Columns of the tables on disk, and the pandera models that hold them.

    Raw -> (verdict) -> Prompts + Quarantine      Prompts -> Samples -> (scores)

`prompt_id` is the first 16 hex digits of the SHA-256 of (messages, answer); with `sample` (or stage, step and sample in a stage's
completions) it names a completion in every table. pandera is imported here and nowhere in schemas/ besides.
"""

import pandera.polars as pa
import polars as pl

MESSAGES = pl.List(pl.Struct({"role": pl.String, "content": pl.String}))
FAULTS = pl.List(pl.Struct({"rule": pl.String, "value": pl.String}))
SIDES = ["train", "eval"]


class Raw(pa.DataFrameModel):
    """Every row as read: nothing dropped, nothing built yet."""

    side: str = pa.Field(isin=SIDES)
    source: str
    """File or hub id, as written in the config."""
    line: int = pa.Field(ge=1)
    """Line in the file on which the row begins; row number counted from 1 for Parquet, JSON arrays and hub data."""
    question: str = pa.Field(nullable=True)
    """Bare question; null when the row has ready messages or cannot be read."""
    messages: pl.List = pa.Field(nullable=True, dtype_kwargs={"inner": MESSAGES.inner})
    """Ready messages; null when the row has a bare question or cannot be read."""
    answer: str = pa.Field(nullable=True)
    """Answer column as text, nothing extracted and nothing normalised."""
    extra: str
    """Other columns of the row as one JSON object."""
    faults: pl.List = pa.Field(nullable=True, dtype_kwargs={"inner": FAULTS.inner})
    """Structural rules (grpo_tasks/data/rules.py) broken while reading; null for a sound row."""

    class Config:
        """pandera: no other columns."""

        strict = True


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
    """After the chat template. Exact up to 100,000 rows; beyond, an upper bound where that is within the limit anyway."""
    extra: str
    """Other columns of the row as one JSON object; reward functions get them as keyword arguments."""

    class Config:
        """pandera: no other columns."""

        strict = True


class Quarantine(pa.DataFrameModel):
    """Refused rows, one line for each rule a row breaks."""

    side: str = pa.Field(isin=SIDES)
    source: str
    line: int = pa.Field(ge=1)
    rule: str
    """Name in grpo_tasks/data/rules.py."""
    value: str
    """What was found, shortened."""
    meaning: str
    """The rule in a sentence."""

    class Config:
        """pandera: no other columns."""

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
        """pandera: further columns are allowed."""

        strict = False
