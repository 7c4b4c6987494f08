"""Sections `data` and `validation`: where rows come from, and which of them are rejected."""

import codecs
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, StringConstraints

from schemas.config.section import Details, Folded, Section, T
from schemas.config.types import MOST_ROWS, MOST_TOKENS, Address, Fraction, Name

ColumnsAndSplit = Annotated[T, Folded("columns_and_split")]

TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""It is part of metric names, so it holds only what MLflow accepts there."""
PromptFormat = Literal["conversational", "standard"]


def _delimiter(given: str) -> str:
    mark = {"\\t": "\t", "tab": "\t", "semicolon": ";", "comma": ","}.get(given, given)
    if len(mark) != 1 or mark in '"\r\n' or mark.isalnum():
        raise ValueError('a delimiter is one character other than a letter, digit or quote; fix: delimiter: ";"')
    return mark


def _encoding(given: str) -> str:
    try:
        return codecs.lookup(given).name
    except LookupError as error:
        raise ValueError(f"no encoding is called {given}; fix: utf-8, utf-16, cp1252 or latin-1") from error


def template_columns(template: str) -> list[str]:
    """The columns that a template such as `{Body} {Question}` names (`{{` and `}}` are braces); ValueError for any other text."""
    fix = 'fix: name columns in braces, for example "{Body} {Question}", and double other braces'
    try:
        fields = [(name, form, change) for _, name, form, change in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"the template is malformed: {error}; {fix}") from error
    if not fields or any(not name or form or change for name, form, change in fields):
        raise ValueError(f"the template needs column names in its braces, and nothing else; {fix}")
    return [name for name, _, _ in fields]


def _template(given: str) -> str:
    template_columns(given)
    return given


Template = Annotated[str, AfterValidator(_template)]


class DataSource(Section):
    """One file, several files of one form, or one hub data set."""

    path: Address
    """JSONL, JSON, CSV, TSV, Parquet or Arrow file (from the working directory), also packed (.gz, .zst); a pattern such as
    parts/*.parquet; a folder of such files, or one that save_to_disk wrote; hub id such as openai/gsm8k; or embedded:FILE."""
    format: Details[Literal["auto", "jsonl", "csv", "parquet", "arrow", "hub"]] = "auto"
    """File format. auto goes by the file name's extension; a name without one that is not on this disk is a hub id."""
    name: Details[str | None] = None
    """Configuration name of a hub data set, for example main."""
    split: Details[str] = "train"
    """Split of a hub data set, a saved data set, or a folder whose file names tell splits apart."""
    revision: Details[str | None] = None
    """Revision of a hub data set (branch, tag or commit)."""
    max_rows: Details[int | None] = Field(None, ge=1, le=MOST_ROWS)
    """Read only the first N rows. Empty: all."""
    task: TaskName | None = None
    """Task of the rows of this source. Empty: data.task_column names it, or the data has a single task."""
    delimiter: Details[Annotated[str, AfterValidator(_delimiter)] | None] = None
    r"""Character between the cells of a CSV file, for example `;` or `\t`. Empty: comma, semicolon, tab or bar, by the header."""
    encoding: Details[Annotated[str, AfterValidator(_encoding)] | None] = None
    """Encoding of a text file, for example cp1252. Empty: found out, and named in the validation report."""
    question: Details[Template | None] = None
    """Template of the question for this source. Empty: data.question."""
    answer_pattern: Details[str | None] = None
    """Pattern of the ground truth for this source. Empty: data.answer_pattern."""
    rename: Details[dict[str, str]] = Field(default_factory=dict)
    """New names of columns of this source, {old: new}, in addition to data.rename."""
    _locked: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def locked_files(self) -> Mapping[str, str]:
        """SHA-256 of each file when the run started, by its name; empty before, and for a hub data set."""
        return self._locked

    @property
    def sha256(self) -> str | None:
        """Of the file `path` when the run started; None before, and for several files or a hub data set."""
        return self._locked.get(self.path)

    def locked(self, files: Mapping[str, str]) -> Self:
        """The source whose files must be these, with these contents, when it is read; no file or form shows it."""
        source = self.model_copy()
        source._locked = dict(files)
        return source


class TaskConfig(Section):
    """One task of a data set with several."""

    weight: float = Field(1.0, gt=0.0, le=1e6)
    """Share of the task in the prompts of an update, relative to the weights of the other tasks."""
    rewards: list[Name] | None = None
    """Reward functions that apply to rows of the task. A stage calls those of them that it lists; its other functions count as
    None for these rows. Empty: all functions of the stage."""
    answers: Literal["required", "optional"] = "required"
    """Whether a row of the task needs a ground truth."""


def applies(tasks: Mapping[str, TaskConfig], task: str, reward: str) -> bool:
    """Whether a reward function applies to rows of a task."""
    allowed = tasks[task].rewards if task in tasks else None
    return allowed is None or reward in allowed


class DataConfig(Section):
    """Prompts with their ground truth."""

    train: list[DataSource] = Field(min_length=1)
    """Where training prompts come from."""
    eval: list[DataSource] = Field(default_factory=list)
    """Where held-out prompts come from. Empty: a share of the training data is held out (eval_fraction)."""
    eval_fraction: ColumnsAndSplit[float] = Field(0.1, gt=0.0, lt=1.0)
    """Share of rows to hold out when there is no eval source. A hash of the row decides, so a row never changes splits."""
    question_column: ColumnsAndSplit[str] = "question"
    """Column with the bare question. Used when there is no prompt column."""
    prompt_column: ColumnsAndSplit[str] = "prompt"
    """Column with chat messages (a list of {role, content}), or with strings in TRL's standard format."""
    answer_column: ColumnsAndSplit[str | None] = "answer"
    """Column with the ground truth: text, a number, true or false, a date, an object, or a list of several right answers. null:
    the task has no ground truth, and a column `answer` is one like any other."""
    answer_pattern: ColumnsAndSplit[str | None] = None
    r"""Regular expression whose first group is the ground truth inside the answer column, for example `#### (.+)`. The last match
    counts. The syntax is that of Rust, which takes linear time: no look-around, no back-references."""
    number_format: ColumnsAndSplit[Literal["auto", "comma", "point"]] = "auto"
    """How ground truths write numbers. point: 1,234.5. comma: 1.234,5, which becomes 1234.5. auto: comma for a source that
    has decimal commas such as 1,50 and no decimal points. The validation says which sources do."""
    system_prompt: str | None = None
    """System message that is put before every question, and before chat messages that have none."""
    question: ColumnsAndSplit[Template | None] = None
    """Template that joins columns into the question, for example `{Body} {Question}`; a column with `?`, as in `{input?}`, may be
    empty. Empty: question_column."""
    rename: ColumnsAndSplit[dict[str, str]] = Field(default_factory=dict)
    """New names of columns, {old: new}. Applied before all other settings; a column that a source does not have is skipped."""
    format: ColumnsAndSplit[Literal["auto", "conversational", "standard"]] = "auto"
    """Form of the prompts. conversational: chat messages; a string becomes a user message. standard: strings, which the model
    continues without a chat template. auto: by what the prompt column holds; a question is always a user message."""
    duplicates: ColumnsAndSplit[Literal["drop", "quarantine", "keep"]] = "drop"
    """What happens to a row whose prompt and answer occurred before in the same split. drop: it is left out and counted.
    quarantine: it counts towards max_invalid_fraction. keep: it is used again."""
    task_column: ColumnsAndSplit[str | None] = None
    """Column with the name of the row's task. Empty: the task of the source, if any."""
    tasks: ColumnsAndSplit[dict[TaskName, TaskConfig]] = Field(default_factory=dict)
    """Settings of single tasks, by name. Empty: each row has the same chance, and every reward function applies to every row."""

    def _faults(self) -> Iterator[str]:
        if self.format == "standard" and self.system_prompt is not None:
            yield "a prompt in the standard format has no system message; fix: format: conversational, or remove system_prompt"
        if self.tasks and self.task_column is None and not any(source.task for source in [*self.train, *self.eval]):
            yield "tasks are set, but no row has a task; fix: task_column: COLUMN, or task: NAME on each source"

    def rewards_of(self, task: str) -> set[str] | None:
        """Reward functions that apply to rows of a task; None: all of the stage."""
        allowed = self.tasks[task].rewards if task in self.tasks else None
        return None if allowed is None else set(allowed)


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
