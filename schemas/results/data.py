"""Results of preparing and validating the data."""

from pathlib import Path
from typing import ClassVar, Literal

from schemas.results.base import Result, StepResult


class SourceFile(Result):
    """One source of rows."""

    path: str
    """As written in the config."""
    split: Literal["train", "eval"]
    rows: int
    sha256: str
    """Hash of the bytes of the file, or of the rows of a hub data set."""


class PreparedData(StepResult):
    """All rows as read, in one table (rows.parquet, see Raw in schemas/tables.py)."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("rows.parquet",)

    sources: list[SourceFile]
    rows: int


class RuleCount(Result):
    """Number of rows that violate a row rule."""

    rule: str
    meaning: str
    rows: int


class TokenLengths(Result):
    """Prompt lengths in tokens, chat template included."""

    mean: float
    p50: int
    p95: int
    max: int
    limit: int


class DataReport(StepResult):
    """Result of validation. Files: train.parquet, eval.parquet (Prompts in schemas/tables.py), quarantine.parquet, report.md."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("train.parquet", "eval.parquet")

    rows: int
    """Number of rows read."""
    quarantined: int
    """Number of rejected rows."""
    train_rows: int
    eval_rows: int
    rules: list[RuleCount]
    prompt_tokens: TokenLengths
    digest: str
    """SHA-256 of the accepted rows of both splits, in order. It identifies the data of a model."""
    sources: list[SourceFile]
    """The sources of the rows."""

    @property
    def train(self) -> Path:
        """Accepted training rows."""
        return self.directory / "train.parquet"

    @property
    def eval(self) -> Path:
        """Accepted held-out rows."""
        return self.directory / "eval.parquet"
