"""Results of preparing and validating the data, and of the reward lab."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from schemas.config.data import PromptFormat
from schemas.results.base import Result, StepResult


class SourceFile(Result):
    """One source of rows."""

    path: str
    split: Literal["train", "eval"]
    rows: int
    sha256: str
    """Hash of the bytes of the file, or of the rows of a hub data set."""
    encoding: str = ""
    delimiter: str = ""
    unit: Literal["line", "row", "record"] = "line"
    """What the numbers of its rows count."""
    columns: list[str] = Field(default_factory=list)
    """Of its first row, renamed as configured."""
    with_answer: int = 0
    """Rows that have the answer column, or a reply of the assistant in its place."""
    form: str = ""
    """Column by which rows of a well-known form ask: messages, conversations, chosen, or instruction (Alpaca)."""
    of_form: int = 0
    """Rows that do."""


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


class TaskRows(Result):
    """Number of accepted rows of one task."""

    task: str
    train_rows: int
    eval_rows: int


class PromptTable(Result):
    """A table of accepted rows (Prompts in schemas/tables.py) that counts in a key by its content alone, whatever made it."""

    path: Path


class DataReport(StepResult):
    """Result of validation. Files: train.parquet, eval.parquet (Prompts in schemas/tables.py), quarantine.parquet, report.md."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("train.parquet", "eval.parquet")

    rows: int
    quarantined: int
    duplicates: int = 0
    """Rows that were left out because they repeat an earlier one."""
    format: PromptFormat = "conversational"
    tasks: list[TaskRows] = Field(default_factory=list)
    """Empty when the data has a single task."""
    train_rows: int
    eval_rows: int
    rules: list[RuleCount]
    prompt_tokens: TokenLengths
    digest: str
    """SHA-256 of the accepted rows of both splits, in order. It identifies the data of a model."""
    sources: list[SourceFile]

    def headline(self) -> str:
        """What became of the rows."""
        rejected = f", {self.quarantined:,} rejected" if self.quarantined else ""
        copies = f", {self.duplicates:,} left out as duplicates" if self.duplicates else ""
        return f"{self.rows:,} rows read: {self.train_rows:,} to train on, {self.eval_rows:,} held out{rejected}{copies}"

    @property
    def train(self) -> Path:
        """Accepted training rows."""
        return self.directory / "train.parquet"

    @property
    def eval(self) -> Path:
        """Accepted held-out rows."""
        return self.directory / "eval.parquet"

    @property
    def train_table(self) -> PromptTable:
        """The accepted training rows as an input that counts by its content: another seed may lead to the same rows."""
        return PromptTable(path=self.train)


class GuardData(DataReport):
    """Result of validating the prompts of a guard of the promotion. They are no data of the model: nothing is trained on them."""

    label: str


class LabCheck(Result):
    """One check of one reward function."""

    function: str
    check: str
    """contract, determinism, speed, order, empty, gaming, signal ..."""
    outcome: Literal["passed", "ignored", "warned", "failed"]
    """ignored: it found something, and lab.ignore_checks names it."""
    detail: str = ""
    prompt_id: str = ""
    place: str = ""
    probe: str = ""
    """Kind of completion: perfect, empty, tag_stuffed ..."""
    completion: str = ""  # shortened to 200 characters
    source: str = ""
    """File, line and function of the user's code that an exception came from."""
    arguments: str = ""
    """Types and sizes of the arguments of the call that raised."""
    fix: str = ""
    """Where the finding says more than its check does."""


class SignalForecast(Result):
    """Share of groups with a learning signal, estimated from samples of the base model."""

    stage: str
    groups: int
    share_with_signal: float
    """Share of groups whose completions earn different total rewards."""
    mean_reward: float
    mean_reward_std: float
    pass_rates: list[int] = Field(default_factory=list)
    """Sampled prompts by the share of their completions that are solved, in the bins of evaluation.py BINS."""
    full_scores: dict[str, float] = Field(default_factory=dict)
    """A better full score of each function whose own does not fit its scores: no completion, or every one, counts as solved."""

    @property
    def never_or_always(self) -> float:
        """Share of the sampled prompts that are never solved, or always."""
        known = sum(self.pass_rates)
        return (self.pass_rates[0] + self.pass_rates[-1]) / known if known else 0.0


class PromptsUsed(Result):
    """How many prompts were sampled where sampling may stop early, and why it stopped."""

    section: Literal["evaluation", "lab"]
    """Of the settings that made it stop."""
    used: int
    """The first ones in the order of their ids."""
    of: int
    stopped: Literal["all", "interval", "time"]
    looks: int
    """At so many numbers of prompts it could stop by the interval, the last one included; 1: it could not."""
    half_width: float | None
    """Half the width of the interval when it was last looked at; None if it never was."""
    seconds: float
    """Time of sampling."""

    def text(self) -> str:
        """What was used and why, without a full stop."""
        said = f"{self.used:,} of {self.of:,} prompts were sampled"
        if self.stopped == "interval" and self.half_width is not None:
            return f"{said}: the interval is within {100 * self.half_width:.1f} points ({self.section}.max_half_width)"
        if self.stopped == "time":
            return f"{said}: there was no time for more ({self.section}.max_minutes)"
        return said


class LabReport(StepResult):
    """Result of the reward lab. Files: probes.parquet (each probe with each score), report.md."""

    checks: list[LabCheck]
    forecasts: list[SignalForecast]
    left_out: list[str] = Field(default_factory=list)
    """Checks that could not be made, each with its reason."""
    prompts_used: PromptsUsed | None = None
    """None where sampling could not stop early."""

    def headline(self) -> str:
        """How many checks were made, and how many found something."""
        return f"{len(self.checks)} checks: {len(self.failures)} failed, {len(self.warnings)} warned"

    @property
    def failures(self) -> list[LabCheck]:
        """The checks that stop the run."""
        return [check for check in self.checks if check.outcome == "failed"]

    @property
    def warnings(self) -> list[LabCheck]:
        """The checks that found something, and do not stop the run."""
        return [check for check in self.checks if check.outcome == "warned"]
