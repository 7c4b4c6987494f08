"""One record of a source -> one raw row: question or messages, answer as text, the other columns as JSON.

    {"prompt": [...], "answer": 51.0, "level": 3}  ->  Row(messages=[...], answer="51.0", extra='{"level":3}', faults=[])

Checks structure only, and never raises for a bad record: what cannot be represented becomes a fault of the row.
"""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

import orjson

Fields = Mapping[str, object]
_TOO_DEEP = "a column is nested more than 254 levels deep"


class Fault(NamedTuple):
    """A rule that a row breaks, with what was found."""

    rule: str
    """Name in the table of grpo_tasks/data/rules.py."""
    value: str


class Columns(NamedTuple):
    """Names of the columns that the pipeline reads (data.*_column of the config)."""

    question: str
    prompt: str
    answer: str


class Record(NamedTuple):  # one is made for every row; a frozen dataclass costs three times as much
    """What a reader found on one line: the columns, or the fault that makes them unreadable."""

    line: int
    fields: Fields | None
    faults: tuple[Fault, ...] = ()


class Row(NamedTuple):
    """A raw row without its source and line (schemas/tables.py Raw)."""

    question: str | None = None
    roles: Sequence[str] | None = None
    contents: Sequence[str] | None = None
    """As long as `roles`; both are None when the row has no chat messages."""
    answer: str | None = None
    extra: str = "{}"
    faults: tuple[Fault, ...] = ()


class Messages(NamedTuple):
    """The roles and contents of a prompt column; empty, with faults, when it is not a list of messages."""

    roles: Sequence[str] = ()
    contents: Sequence[str] = ()
    faults: tuple[Fault, ...] = ()


def read_row(record: Record, columns: Columns) -> Row:
    """The raw row of a record, valid or not."""
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
    """The messages of a prompt column; text that is a JSON list (as in CSV cells) is parsed first."""
    if isinstance(prompt, str) and prompt.lstrip().startswith("["):
        try:
            prompt = orjson.loads(prompt)
        except orjson.JSONDecodeError as error:
            return Messages(faults=(Fault("prompt_not_list", f"{error}: {shorten(str(prompt))}"),))
    if not isinstance(prompt, list):
        return Messages(faults=(Fault("prompt_not_list", short_json(prompt)),))
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
            return Messages(faults=(Fault("message_shape", short_json(message)),))
        # Parquet and hub data fill a key that only other rows use with null; that means absent.
        if len(message) > 2 and any(message[key] is not None for key in message.keys() - {"role", "content"}):
            extra = Fault("message_extra_keys", short_json(message))
        roles.append(role)
        contents.append(content)
    return Messages(roles, contents, (extra,) if extra else ())


def short_json(value: object) -> str:
    """A value as JSON, shortened, for the quarantine; the name of its type when it has no JSON form."""
    try:
        return shorten(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode())
    except (TypeError, ValueError):
        return shorten(str(type(value).__name__))


def shorten(text: str, limit: int = 200) -> str:
    """The text, or its beginning and an ellipsis, at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _question(value: object, faults: list[Fault]) -> str | None:
    if isinstance(value, str):
        return value
    faults.append(Fault("prompt_missing", "null") if value is None else Fault("question_not_text", short_json(value)))
    return None


def _answer(value: object, faults: list[Fault]) -> str | None:
    if value is None or isinstance(value, str):
        return value
    # bool is a subclass of int in Python
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and math.isfinite(value):
        # Normalisation does not recognise scientific notation (1e+22, 5E+1), so the digits are written out.
        return format(Decimal(repr(value)) if isinstance(value, float) else Decimal(value), "f")
    faults.append(Fault("answer_type", short_json(value)))
    return None


def _extra(fields: Fields, used: set[str], faults: list[Fault]) -> str:
    if fields.keys() <= used:
        return "{}"
    others = {key: value for key, value in fields.items() if key not in used}
    try:
        return orjson.dumps(others, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, ValueError):
        faults.append(Fault("unreadable_line", _TOO_DEEP))
        return "{}"
