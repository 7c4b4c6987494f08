"""Sections `data` and `validation`: where rows come from and which of them are refused."""

from typing import ClassVar, Literal

from pydantic import Field

from schemas.config.section import Section
from schemas.config.types import MOST_ROWS, MOST_TOKENS, Address, Fraction


class DataSource(Section):
    """One file or hub data set."""

    GROUPS: ClassVar = {
        "details": (
            "format",
            "name",
            "split",
            "revision",
            "max_rows",
        ),
    }

    path: Address
    """JSONL, CSV or Parquet file (relative to the working directory), a hub id such as openai/gsm8k, or embedded:FILE."""
    format: Literal["auto", "jsonl", "csv", "parquet", "hub"] = "auto"
    """How to read it; auto goes by the ending of the name, and takes what has none and does not exist as a hub id."""
    name: str | None = None
    """Configuration name of a hub data set, for example main."""
    split: str = "train"
    """Split of a hub data set."""
    revision: str | None = None
    """Revision of a hub data set (branch, tag or commit)."""
    max_rows: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Take only the first so many rows; none takes all."""


class DataConfig(Section):
    """Prompts with their ground truth."""

    GROUPS: ClassVar = {
        "columns_and_split": (
            "eval_fraction",
            "question_column",
            "prompt_column",
            "answer_column",
            "answer_pattern",
        ),
    }

    train: list[DataSource] = Field(min_length=1)
    """Where training prompts come from."""
    eval: list[DataSource] = Field(default_factory=list)
    """Where held-out prompts come from; empty: a share of the training data is held out."""
    eval_fraction: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of rows held out when no eval source is given; chosen by a hash of the row, so a row never changes sides."""
    question_column: str = "question"
    """Column with the bare question; used when there is no prompt column."""
    prompt_column: str = "prompt"
    """Column with ready chat messages (list of {role, content})."""
    answer_column: str = "answer"
    """Column with the ground truth."""
    answer_pattern: str | None = None
    r"""Pattern whose first group is the ground truth inside the answer column, for example `#### (.+)`; the last match
    counts. Linear-time syntax (Rust regex): no look-around, no back-references."""
    system_prompt: str | None = None
    """System message put in front of every question, and of ready prompts that have none."""


class ValidationConfig(Section):
    """Which rows are refused. Refused rows go to the quarantine table, never silently away."""

    max_invalid_fraction: Fraction = 0.01
    """Share of rows that may be quarantined before the run stops."""
    max_prompt_length: int = Field(512, ge=1, le=MOST_TOKENS)
    """Longest prompt in tokens after the chat template; longer ones are quarantined, never cut."""
    min_train_rows: int = Field(1, ge=1, le=MOST_ROWS)
    """Fewest good training rows to go on with."""
    min_eval_rows: int = Field(1, ge=1, le=MOST_ROWS)
    """Fewest good held-out rows to go on with."""
    ignore_rules: list[str] = Field(default_factory=list)
    """Names of row rules that are not applied (see the validation report for the names)."""
