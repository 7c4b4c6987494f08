"""Which columns of a file may hold the question, the chat messages and the ground truth, the likeliest first.

A name alone is not enough: `prompt` may hold text or messages, `answer` may be empty in every row. So names order the columns,
and values decide whether a column is a candidate at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    """Every plausible way to read the rows: chats before questions, likelier columns first; empty when no column holds text."""
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
