"""Columns of the tables on disk, as pandera models.

    Raw -> (verdict) -> Prompts + Quarantine      Prompts -> Samples -> (scores)      PassRates -> StagePrompts + LeftOut

`prompt_id` (grpo_tasks/data/table.py) and `sample` identify a completion in every table; in those of a stage also stage and step.
"""

import pandera.polars as pa
import polars as pl

MESSAGES = pl.List(pl.Struct({"role": pl.String, "content": pl.String}))
FAULTS = pl.List(pl.Struct({"rule": pl.String, "value": pl.String}))
SPLITS = ["train", "eval"]


class _Strict(pa.DataFrameModel):
    class Config:
        """pandera: no other columns."""

        strict = True


class Raw(_Strict):
    """Every row as read: none is dropped, and prompts are not built yet."""

    split: str = pa.Field(isin=SPLITS)
    source: str
    """File or hub id, as written in the config."""
    line: int = pa.Field(ge=1)
    """Line in the file on which the row begins; row number counted from 1 for Parquet, JSON arrays and hub data."""
    question: str = pa.Field(nullable=True)
    messages: pl.List = pa.Field(nullable=True, dtype_kwargs={"inner": MESSAGES.inner})
    answer: str = pa.Field(nullable=True)
    """Answer column as text, before extraction and normalisation."""
    extra: str
    """Other columns of the row as one JSON object."""
    faults: pl.List = pa.Field(nullable=True, dtype_kwargs={"inner": FAULTS.inner})
    """Structural rules (grpo_tasks/data/rules.py) that reading found broken; null for a valid row."""
    text: str = pa.Field(nullable=True)
    """Prompt that is a string, as in TRL's standard format. A row has a question, messages or this, or cannot be read."""
    answers: pl.List = pa.Field(nullable=True, dtype_kwargs={"inner": pl.String})
    """Every answer as text where the answer column is a list; `answer` is the first of them then."""
    task: str = pa.Field(nullable=True)
    """Empty when the data has a single task, null when the task column has no text."""


class Prompts(_Strict):
    """Accepted rows of one split."""

    prompt_id: str = pa.Field(str_matches=r"^[0-9a-f]{16}$")
    source: str
    line: int = pa.Field(ge=1)
    prompt: pl.List = pa.Field(dtype_kwargs={"inner": MESSAGES.inner})
    answer: str = pa.Field(nullable=True, str_length={"min_value": 1})
    """Ground truth, normalised; the first of several; null for a row without ground truth."""
    answers: pl.List = pa.Field(nullable=True, dtype_kwargs={"inner": pl.String})
    """Every ground truth, normalised, where the data lists several."""
    task: str
    prompt_tokens: int = pa.Field(ge=1)
    """After the chat template. Exact up to 100,000 rows of data; beyond, an upper bound where that is within the limit."""
    extra: str
    """Other columns of the row as one JSON object."""


class StagePrompts(Prompts):
    """Rows that a stage trains on, where pass rates are known before training."""

    pass_rate: float = pa.Field(nullable=True, ge=0.0, le=1.0)
    """Share of completions that solve the prompt by the rewards of the stage; null where it is unknown."""
    pass_rate_low: float = pa.Field(nullable=True, ge=0.0, le=1.0)
    """Lower bound of its interval; null for a rate from the user's data."""
    pass_rate_high: float = pa.Field(nullable=True, ge=0.0, le=1.0)


class LeftOut(_Strict):
    """Training rows that a stage leaves out because of their pass rate."""

    prompt_id: str
    source: str
    line: int = pa.Field(ge=1)
    question: str
    """Last message of the prompt."""
    answer: str = pa.Field(nullable=True)
    """Ground truth; where it is never reached, it may be wrong."""
    pass_rate: float = pa.Field(ge=0.0, le=1.0)
    pass_rate_low: float = pa.Field(nullable=True)
    pass_rate_high: float = pa.Field(nullable=True)
    reason: str = pa.Field(isin=["never_solved", "below", "above", "always_solved"])
    frequent_answer: str = pa.Field(nullable=True)
    """Answer that the model gives most often; null where it gives none."""
    frequent_share: float = pa.Field(nullable=True, ge=0.0, le=1.0)


class PassRates(_Strict):
    """How often the training prompts are solved, one line for each stage and prompt."""

    stage: str
    """Stage whose rewards decide what is solved."""
    prompt_id: str
    pass_rate: float = pa.Field(nullable=True, ge=0.0, le=1.0)
    """Null where no reward function of the stage applies."""
    pass_rate_low: float = pa.Field(nullable=True, ge=0.0, le=1.0)
    pass_rate_high: float = pa.Field(nullable=True, ge=0.0, le=1.0)
    samples: int = pa.Field(nullable=True, ge=0)
    """Completions that were judged; null for a rate from the user's data."""
    frequent_answer: str = pa.Field(nullable=True)
    frequent_share: float = pa.Field(nullable=True, ge=0.0, le=1.0)


class Quarantine(_Strict):
    """Refused rows, one line for each rule that a row breaks."""

    split: str = pa.Field(isin=SPLITS)
    source: str
    line: int = pa.Field(ge=1)
    rule: str
    """Name of a rule in grpo_tasks/data/rules.py."""
    value: str
    """What was found in the row, shortened."""
    meaning: str


class Samples(pa.DataFrameModel):
    """Completions of one model for held-out prompts; further columns are allowed."""

    prompt_id: str
    sample: int = pa.Field(ge=-1)
    """0 .. num_samples - 1; -1 for the greedy completion."""
    completion: str
    completion_tokens: int = pa.Field(ge=0)
    finish_reason: str = pa.Field(isin=["stop", "length"])
