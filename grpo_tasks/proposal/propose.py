"""A data file -> a proposal that the validation step accepts.

    file --preview--> rows --columns.py, answers.py--> candidates --the pipeline's own validation--> the first one that works

Nothing is written but a temporary folder. The limits of the proposal (prompt length, share of refused rows) are those of the
trial, so `grpo validate` agrees with it.
"""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from grpo_tasks.answers.ground_truths import find_unusable_truths
from grpo_tasks.data.report import Origin
from grpo_tasks.data.sources import ROWS, load_sources, preview
from grpo_tasks.data.validation import validate_rows
from grpo_tasks.proposal.answers import find_equality, find_pattern
from grpo_tasks.proposal.columns import ColumnChoice, candidates
from schemas.config.completion import CompletionConfig, Equality
from schemas.config.data import DataConfig, DataSource, ValidationConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import DataError
from schemas.results.data import DataReport

PREVIEW_ROWS = 500
"""Rows that decide about columns, pattern and equality."""
TRIAL_ROWS = 20_000
"""Rows that are validated to find the limits."""
SYSTEM_PROMPT = "Reply with <reasoning>...</reasoning><answer>...</answer>."
EMBEDDED_CONTEXT = 2048
"""Context of the embedded model in tokens."""
COMPLETION_TOKENS = 128
MOST_PROMPT_TOKENS = EMBEDDED_CONTEXT - COMPLETION_TOKENS
MOST_REFUSED = 0.5
_SEED = 42
_HELD_OUT = {"train": ("test", "eval", "validation", "valid", "dev")}


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the config says about a data file, and why."""

    train: str
    """Path of the file, as the user gave it."""
    eval: str | None
    """Path of a file of held-out rows beside it."""
    choice: ColumnChoice
    pattern: str | None
    pattern_meaning: str
    equality: Equality
    columns: list[str]
    """All columns of the file."""
    rows: int
    refused: int
    """Rows that the rules refuse."""
    reasons: list[str]
    """The rules that refuse rows, with counts."""
    max_prompt_length: int

    @property
    def max_invalid_fraction(self) -> float:
        """The default of the pipeline, or somewhat more than what this file has."""
        share = self.refused / max(self.rows, 1)
        return 0.01 if share <= 0.01 else math.ceil(120 * share) / 100


def propose(path: str, *, question: str | None = None, answer: str | None = None) -> Proposal:
    """The first reading of the file that the pipeline accepts.

    Args:
        path: JSONL, JSON, CSV, TSV or Parquet.
        question: column that the user has named; it may also be one of chat messages.
        answer: column that the user has named; empty: the task has no ground truth.

    Raises:
        DataError: the file cannot be read, no column holds questions, or the rules refuse most rows of every reading.
    """
    rows = preview(DataSource(path=path), PREVIEW_ROWS)
    columns = list(dict.fromkeys(str(column) for row in rows for column in row))
    found = [choice for choice in candidates(rows) if question in (None, choice.question, choice.chat)]
    if answer is not None:
        found = [ColumnChoice(one.question, one.chat, answer or None, one.context) for one in found]
    refusals: list[str] = []
    for choice in found:
        texts = [str(row[choice.answer]) for row in rows if choice.answer and row.get(choice.answer) is not None]
        pattern = find_pattern(texts)
        try:
            with tempfile.TemporaryDirectory() as folder:
                return _tried(path, choice, pattern, columns, Path(folder))
        except DataError as error:
            refusals.append(f"{choice.question or choice.chat}: {error.message.splitlines()[0]}")
    raise DataError(
        "no column holds questions that can be used" + "".join(f"\n  {refusal}" for refusal in refusals),
        place=f"{path} (columns: {', '.join(columns)})",
        fix="name the columns: grpo init FILE --question COLUMN --answer COLUMN",
    )


def data_settings(choice: ColumnChoice, columns: list[str], pattern: str | None) -> dict[str, object]:
    """The settings of section `data` that describe a reading."""
    settings: dict[str, object] = {}
    if choice.context:
        settings["question"] = f"{{{choice.context}}} {{{choice.question}}}"
    elif choice.question:
        settings["question_column"] = choice.question
    if choice.chat:
        settings["prompt_column"] = choice.chat
    elif "prompt" in columns and choice.question != "prompt":
        # A column called prompt would win over the question; this name is no column.
        settings["prompt_column"] = "no_prompt_column"
    elif choice.question == "prompt":
        settings["prompt_column"] = "no_prompt_column"
    settings["answer_column"] = choice.answer
    if pattern:
        settings["answer_pattern"] = pattern
    return settings


def _tried(path: str, choice: ColumnChoice, pattern: tuple[str, str] | None, columns: list[str], folder: Path) -> Proposal:
    """Validate the file with this reading; raises `DataError` when the rules refuse most rows."""
    held_out = _held_out_beside(Path(path))
    sources = {"train": [{"path": path, "max_rows": TRIAL_ROWS}]} | ({"eval": [{"path": held_out}]} if held_out else {})
    settings = data_settings(choice, columns, pattern[0] if pattern else None)
    data = DataConfig.model_validate(sources | settings | {"system_prompt": SYSTEM_PROMPT})
    report = _validated(data, folder)
    if report.quarantined > MOST_REFUSED * report.rows:
        worst = max(report.rules, key=lambda rule: rule.rows)
        raise DataError(f"{report.quarantined:,} of {report.rows:,} rows are refused: {worst.meaning}")
    truths = pl.read_parquet(report.train, columns=["answer"])["answer"].drop_nulls().head(PREVIEW_ROWS).to_list()
    return Proposal(
        train=path,
        eval=held_out,
        choice=choice,
        pattern=pattern[0] if pattern else None,
        pattern_meaning=pattern[1] if pattern else "",
        equality=find_equality(truths) if choice.answer else "exact",
        columns=columns,
        rows=report.rows,
        refused=report.quarantined,
        reasons=[f"{rule.rows:,} x {rule.meaning}" for rule in report.rules if rule.rows],
        max_prompt_length=min(MOST_PROMPT_TOKENS, 32 * math.ceil(report.prompt_tokens.max / 32)),
    )


def _validated(data: DataConfig, folder: Path) -> DataReport:
    loaded = load_sources(data, directory=folder)
    validation = ValidationConfig(max_invalid_fraction=1.0, max_prompt_length=MOST_PROMPT_TOKENS)
    # The stage trains nothing here: a config has one.
    config = RunConfig(
        data=data,
        validation=validation,
        completion=CompletionConfig(equality="exact"),
        rollout=RolloutConfig(max_completion_length=COMPLETION_TOKENS),
        stages=[StageConfig(name="train", rewards=["format"])],
        seed=_SEED,
    )
    return validate_rows(
        folder / ROWS, config, Origin("", folder, 0.0, loaded.sources), check_truths=find_unusable_truths, warn=lambda *_: None
    )


def _held_out_beside(path: Path) -> str | None:
    """The file of held-out rows that belongs to a file of training rows: test.jsonl beside train.jsonl."""
    for mark, others in _HELD_OUT.items():
        for other in others if mark in path.stem else ():
            beside = path.with_name(path.name.replace(mark, other))
            if beside.is_file():
                return str(beside)
    return None
