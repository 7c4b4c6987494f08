"""Sections `data` and `validation`: where rows come from, and which of them are rejected."""

from typing import ClassVar, Literal

from pydantic import Field

from schemas.config.section import Section
from schemas.config.types import MOST_ROWS, MOST_TOKENS, Address, Fraction


class DataSource(Section):
    """One file or one hub data set."""

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
    """JSONL, CSV or Parquet file (relative to the working directory), a hub id such as openai/gsm8k, or embedded:FILE for a file
    that ships with this project."""
    format: Literal["auto", "jsonl", "csv", "parquet", "hub"] = "auto"
    """File format. auto goes by the file name's extension; a name without one that is not on this disk is a hub id."""
    name: str | None = None
    """Configuration name of a hub data set, for example main."""
    split: str = "train"
    """Split of a hub data set."""
    revision: str | None = None
    """Revision of a hub data set (branch, tag or commit)."""
    max_rows: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Read only the first N rows. Empty: all."""


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
    """Where held-out prompts come from. Empty: a share of the training data is held out (eval_fraction)."""
    eval_fraction: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of rows to hold out when there is no eval source. A hash of the row decides, so a row never changes splits."""
    question_column: str = "question"
    """Column with the bare question. Used when there is no prompt column."""
    prompt_column: str = "prompt"
    """Column with chat messages (a list of {role, content})."""
    answer_column: str = "answer"
    """Column with the ground truth."""
    answer_pattern: str | None = None
    r"""Regular expression whose first group is the ground truth inside the answer column, for example `#### (.+)`. The last match
    counts. The syntax is that of Rust, which takes linear time: no look-around, no back-references."""
    system_prompt: str | None = None
    """System message that is put before every question, and before chat messages that have none."""


class ValidationConfig(Section):
    """Which rows are rejected. Rejected rows go to the quarantine table with their reasons."""

    max_invalid_fraction: Fraction = 0.01
    """Largest share of rejected rows. A larger one stops the run."""
    max_prompt_length: int = Field(512, ge=1, le=MOST_TOKENS)
    """Longest prompt in tokens, chat template included. Longer ones are quarantined, never cut."""
    min_train_rows: int = Field(1, ge=1, le=MOST_ROWS)
    """Fewest valid training rows. With fewer the run stops."""
    min_eval_rows: int = Field(1, ge=1, le=MOST_ROWS)
    """Fewest valid held-out rows. With fewer the run stops."""
    ignore_rules: list[str] = Field(default_factory=list)
    """Names of row rules that are not applied. The validation report lists the names."""
