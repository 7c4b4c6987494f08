"""A data file -> a proposal that the validation step accepts.

    file --preview--> rows --values and names--> candidates --the pipeline's own validation--> the first one that works

Nothing is written but a temporary folder. The limits of the proposal (prompt length, share of refused rows) are those of the
trial, so `grpo validate` agrees with it.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from grpo_tasks.answers.ground_truths import find_unusable_truths
from grpo_tasks.data.normalise import normalise_column
from grpo_tasks.data.sources import ROWS, load_sources, preview
from grpo_tasks.data.validation import Origin, validate_rows
from schemas.config.completion import CompletionConfig, Equality
from schemas.config.data import DataConfig, DataSource, ValidationConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import DataError
from schemas.results.data import DataReport

QUESTIONS = ("question", "problem", "query", "instruction", "quiz", "input", "prompt", "task", "text", "source")
"""Usual names of a question's column, best first. A column that only contains one of them comes after all of these."""
ANSWERS = (
    *("answer", "target", "final_answer", "expert_answer", "ground_truth", "label", "expected", "gold", "solution"),
    *("solution_text", "output", "response", "completion", "result"),
)
CHATS = ("prompt", "messages", "conversation", "conversations", "chat")
CONTEXTS = ("body", "context", "passage", "premise", "input")
"""Columns that a question may refer to: SVAMP's Body, SQuAD's context, Alpaca's input."""
FILLED = 0.9
"""Share of rows in which a column must hold a value of its kind."""

Rows = Sequence[Mapping[str, object]]

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
PATTERNS = (
    (r"#### (.+)", "the text after the last ####, as in GSM8K"),
    (r"\\boxed\{([^{}]*)\}", r"the content of \boxed{}"),
    (r"(?s)<answer>\s*(.*?)\s*</answer>", "the text between <answer> and </answer>"),
    (r"(?i)\banswer is:?\s*(.+?)\.?\s*$", "the text after `answer is`"),
)
"""Marks of the final answer inside a worked solution, in the syntax of Rust's linear-time regular expressions."""
MATCHED = 0.95
"""Share of the answers in which a pattern must occur."""
_LONGEST_CHOICE = 3


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """One way to read the rows of a file."""

    question: str | None
    """Column of the bare question; None when `chat` has the prompt."""
    chat: str | None
    """Column of chat messages."""
    answer: str | None
    """Column of the ground truth; None: the task has none."""
    context: str | None = None
    """Column that stands before the question, because the question alone cannot be understood."""


def candidates(rows: Rows) -> list[ColumnChoice]:
    """Every plausible way to read the rows: chats before questions, likelier columns first; empty when no column holds text.

    Names order the columns, and values decide whether one is a candidate at all: `prompt` may hold text or messages.
    """
    answer = next(iter(answer_columns(rows)), None)
    chats = [ColumnChoice(None, column, answer) for column in chat_columns(rows)]
    questions = [column for column in question_columns(rows) if column != answer]
    return chats + [ColumnChoice(column, None, answer, context_of(rows, column, answer)) for column in questions]


def chat_columns(rows: Rows) -> list[str]:
    """Columns with lists of messages."""
    return [column for column in _columns(rows) if _share(rows, column, _is_chat) >= FILLED]


def question_columns(rows: Rows) -> list[str]:
    """Columns with text, the likeliest question first. A column whose text is always the same is none."""
    texts = [column for column in _columns(rows) if _share(rows, column, _is_text) >= FILLED and _varies(rows, column)]
    named = [column for column in texts if _rank(column, QUESTIONS) < 2 * len(QUESTIONS)]
    # Without a familiar name the longest text is the likeliest question.
    others = sorted((column for column in texts if column not in named), key=lambda column: -_mean_length(rows, column))
    return sorted(named, key=lambda column: _rank(column, QUESTIONS)) + others


def answer_columns(rows: Rows) -> list[str]:
    """Columns with a familiar name that hold texts or numbers, the likeliest first."""
    fitting = [
        column
        for column in _columns(rows)
        if _rank(column, ANSWERS) < 2 * len(ANSWERS) and _share(rows, column, _is_scalar) >= FILLED
    ]
    return sorted(fitting, key=lambda column: _rank(column, ANSWERS))


def context_of(rows: Rows, question: str, answer: str | None) -> str | None:
    """The column that the question refers to, if there is one."""
    if _rank(question, QUESTIONS) >= len(QUESTIONS):
        return None
    for column in _columns(rows):
        if column.lower() in CONTEXTS and column not in (question, answer) and _share(rows, column, _is_text) >= FILLED:
            return column
    return None


def _columns(rows: Rows) -> list[str]:
    return list(dict.fromkeys(str(column) for row in rows for column in row))


def _rank(column: str, names: Sequence[str]) -> int:
    """Place of a column among usual names: exact ones first, then columns that contain one. Neither: twice their number."""
    plain = column.lower().strip().replace(" ", "_")
    if plain in names:
        return names.index(plain)
    parts = plain.split("_")
    return next((len(names) + place for place, name in enumerate(names) if name in parts), 2 * len(names))


def _share(rows: Rows, column: str, fits: Callable[[object], bool]) -> float:
    return sum(fits(row.get(column)) for row in rows) / max(len(rows), 1)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_scalar(value: object) -> bool:
    return _is_text(value) or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in value)
    )


def _varies(rows: Rows, column: str) -> bool:
    return len({str(row.get(column)) for row in rows}) > len(rows) / 20


def _mean_length(rows: Rows, column: str) -> float:
    return sum(len(str(row.get(column) or "")) for row in rows) / max(len(rows), 1)


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
    return validate_rows(folder / ROWS, config, Origin("", folder, 0.0, loaded.sources))


def _held_out_beside(path: Path) -> str | None:
    """The file of held-out rows that belongs to a file of training rows: test.jsonl beside train.jsonl."""
    for mark, others in _HELD_OUT.items():
        for other in others if mark in path.stem else ():
            beside = path.with_name(path.name.replace(mark, other))
            if beside.is_file():
                return str(beside)
    return None


def find_pattern(answers: Sequence[str]) -> tuple[str, str] | None:
    """The pattern that marks the ground truth in nearly all answers, and what it takes; None when the answer is bare."""
    column = pl.Series("answer", answers, dtype=pl.String)
    for pattern, meaning in PATTERNS:
        if len(column) and int(column.str.contains(pattern).sum()) >= MATCHED * len(column):
            return pattern, meaning
    return None


def find_equality(truths: Sequence[str]) -> Equality:
    """How these ground truths are compared: as letters, numbers or expressions if all of them are such, otherwise as text."""
    rows = pl.DataFrame({"answer": truths}, schema={"answer": pl.String}).with_row_index("line")
    rows = rows.with_columns(answer=normalise_column(pl.col("answer")), source=pl.lit(""))
    short = bool((rows["answer"].str.len_chars() <= _LONGEST_CHOICE).all())
    kinds: list[Equality] = ["numeric", "choice", "math"] if short else ["numeric", "math"]
    for kind in kinds:
        if truths and find_unusable_truths(rows, kind).count == 0:
            return kind
    return "exact"
