"""One record of a source -> one raw row: question or messages, answer as text, the other columns as JSON.

    {"prompt": [...], "answer": 51.0, "level": 3}  ->  Row(messages=[...], answer="51", extra='{"level":3}', faults=[])

Judges structure only, and never raises for a bad record: what cannot be represented becomes a fault of the row.
"""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

import orjson

from grpo_tasks.data.rules import Fault, shorten

Fields = Mapping[str, object]
_DEEPEST = "a column is nested more than 254 levels deep"


class Columns(NamedTuple):
    """Names of the columns that mean something (data.*_column of the config)."""

    question: str
    prompt: str
    answer: str


class Record(NamedTuple):  # made once a row; a frozen dataclass costs three times as much
    """What a reader found at one place: columns, or the fault that hid them."""

    line: int
    fields: Fields | None
    faults: tuple[Fault, ...] = ()


class Row(NamedTuple):
    """A raw row without its place (schemas/tables.py Raw)."""

    question: str | None = None
    roles: Sequence[str] | None = None
    contents: Sequence[str] | None = None
    """As many as `roles`; both None when the row has no ready messages."""
    answer: str | None = None
    extra: str = "{}"
    faults: tuple[Fault, ...] = ()


class Messages(NamedTuple):
    """A prompt column taken apart; empty with faults when it is no list of messages."""

    roles: Sequence[str] = ()
    contents: Sequence[str] = ()
    faults: tuple[Fault, ...] = ()


def read_row(record: Record, columns: Columns) -> Row:
    """The raw row of a record, whatever its state."""
    if record.fields is None:
        return Row(faults=record.faults)
    fields = record.fields
    faults = list(record.faults)
    answer = _answer(fields.get(columns.answer), faults)
    prompt = fields.get(columns.prompt)
    if prompt is not None:
        messages = read_messages(prompt)
        faults.extend(messages.faults)
        extra = _extra(fields, {columns.answer, columns.prompt}, faults)
        return Row(None, messages.roles or None, messages.contents or None, answer, extra, tuple(faults))
    question = _question(fields.get(columns.question), faults)
    used = {columns.answer, columns.prompt, columns.question}
    return Row(question, None, None, answer, _extra(fields, used, faults), tuple(faults))


def read_messages(prompt: object) -> Messages:
    """The messages of a prompt column; text that is a JSON list (as in CSV cells) is read as one."""
    if isinstance(prompt, str) and prompt.lstrip().startswith("["):
        try:
            prompt = orjson.loads(prompt)
        except orjson.JSONDecodeError as error:
            return Messages(faults=(Fault("prompt_not_list", f"{error}: {shorten(str(prompt))}"),))
    if not isinstance(prompt, list):
        return Messages(faults=(Fault("prompt_not_list", show(prompt)),))
    if not prompt:
        return Messages(faults=(Fault("messages_empty", "[]"),))
    roles: list[str] = []
    contents: list[str] = []
    extra = None
    for message in prompt:
        try:
            role, content = message["role"], message["content"]
        except (KeyError, TypeError):
            role, content = None, None
        if not isinstance(role, str) or not isinstance(content, str):
            return Messages(faults=(Fault("message_shape", show(message)),))
        if len(message) > 2 and any(message[key] is not None for key in message.keys() - {"role", "content"}):
            extra = Fault("message_extra_keys", show(message))
        roles.append(role)
        contents.append(content)
    return Messages(roles, contents, (extra,) if extra else ())


def show(value: object) -> str:
    """A value as short JSON, for the quarantine."""
    try:
        return shorten(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode())
    except (TypeError, ValueError):
        return shorten(str(type(value).__name__))


def _question(value: object, faults: list[Fault]) -> str | None:
    if isinstance(value, str):
        return value
    faults.append(Fault("prompt_missing", "null") if value is None else Fault("question_not_text", show(value)))
    return None


def _answer(value: object, faults: list[Fault]) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):
        # 1e+22 and 5E+1 would not be recognised as the numbers they are
        return format(Decimal(repr(value)) if isinstance(value, float) else Decimal(value), "f")
    faults.append(Fault("answer_type", show(value)))
    return None


def _extra(fields: Fields, used: set[str], faults: list[Fault]) -> str:
    if fields.keys() <= used:
        return "{}"
    others = {key: value for key, value in fields.items() if key not in used}
    try:
        return orjson.dumps(others, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, ValueError):
        faults.append(Fault("unreadable_line", _DEEPEST))
        return "{}"
