"""One record of a source -> one raw row: question, messages or plain prompt, answers as text, the other columns as JSON.

A row asks by data.question (a template), else prompt, else question, else a well-known form (`known_form`), whichever it has
first. Answers are text and numbers as they are, true and false as in JSON, objects as compact JSON, dates in ISO 8601, or a list
of several right ones. Checks structure only, and never raises for a bad record: what cannot be represented becomes a fault of the
row.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from string import Formatter
from typing import Any, NamedTuple

import orjson

Fields = Mapping[str, object]


class Fault(NamedTuple):
    """A rule of rules.py that a row breaks, with what was found."""

    rule: str
    value: str


CHAT_COLUMNS = ("messages", "conversations", "conversation", "chosen")
"""Chats whose last message is the reply: of supervised data, of ShareGPT, and of pairs of replies (DPO)."""
PREFERRED = "chosen"
"""A reply that somebody prefers is no ground truth. It stays a column, for demonstrations and for `lab.gold`."""
ALPACA = "instruction"
_ALPACA_TEMPLATE, _ALPACA_ANSWER = "{instruction}\n{input?}", "output"
_ROLES_OF = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""ShareGPT's names of the roles."""
_MEDIA_NAME = re.compile(r"(?i)image|img|picture|photo|audio|video")
_MEDIA_TEXT = re.compile(
    r"(?is)data:(?:image|audio|video)/|[^\n]{1,2000}\.(?:png|jpe?g|webp|gif|bmp|tiff?|svg|wav|mp3|flac|mp4|webm)$"
)
_MEDIA_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*", b"fLaC", b"ID3", b"OggS")


OPTIONAL = "?"
"""Behind the name of a column in a template: its text may be missing."""


class Columns(NamedTuple):
    """Which columns of a source the pipeline reads, under their new names."""

    question: str
    prompt: str
    answer: str | None
    """None: the source has no ground truth."""
    task: str | None = None
    only_task: str = ""
    """Task of all rows, unless `task` names a column."""
    template: str | None = None
    rename: Mapping[str, str] | None = None

    def original(self, name: str | None) -> str:
        """Name of a column in the file, before renaming."""
        return next((old for old, new in (self.rename or {}).items() if new == name), name or "")

    def renamed(self, fields: "Fields") -> "Fields":
        """The columns under their new names, which win over columns that had these names before."""
        if not self.rename or self.rename.keys().isdisjoint(fields):
            return fields
        kept = {name: value for name, value in fields.items() if name not in self.rename}
        return kept | {new: fields[old] for old, new in self.rename.items() if old in fields}


class Record(NamedTuple):  # one is made for every row; a frozen dataclass costs three times as much
    """What a reader found on one line: the columns, or the fault that makes them unreadable."""

    line: int
    fields: Fields | None
    faults: tuple[Fault, ...] = ()


class RawRow(NamedTuple):
    """A raw row without its source and line (schemas/tables.py Raw)."""

    question: str | None = None
    roles: Sequence[str] | None = None
    contents: Sequence[str] | None = None
    """As long as `roles`; both are None when the row has no chat messages."""
    answer: str | None = None
    extra: str = "{}"
    faults: tuple[Fault, ...] = ()
    text: str | None = None
    answers: Sequence[str] | None = None
    task: str | None = None


class _Messages(NamedTuple):
    """What a prompt column holds; empty, with faults, when it is not a list of messages."""

    roles: Sequence[str] = ()
    contents: Sequence[str] = ()
    faults: tuple[Fault, ...] = ()


def read_row(record: Record, columns: Columns) -> RawRow:
    """The raw row of a record, valid or not; the record's columns have their new names."""
    if record.fields is None:
        return RawRow(faults=record.faults, task=columns.only_task)
    fields = record.fields
    faults = list(record.faults)
    answer, answers = (None, None) if columns.answer is None else _answers(fields.get(columns.answer), faults)
    named = None if columns.task is None else fields.get(columns.task)
    task = columns.only_task if columns.task is None else _as_text(named) if isinstance(named, str | int) else None
    question = text = None
    messages = _Messages()
    # A function may ask for the ground truth by the column's own name (`solution`), unextracted, as it would get it in TRL.
    # Objects, and answers that are no ground truth, stay for it as they are (PromptRow.given_answer).
    used: set[str | None] = set()
    if columns.answer is not None and _holds_object(fields.get(columns.answer)):
        fields = {**fields, "answer": fields[columns.answer]}
    elif columns.answer == "answer":
        used.add("answer")
    prompt = fields.get(columns.prompt) if columns.template is None else None
    if prompt is not None:
        used.add(columns.prompt)
        if isinstance(prompt, str) and not _is_json_list(prompt):
            text = prompt
        else:
            messages = _read_messages(prompt)
    elif (form := known_form(fields, columns)) == ALPACA:
        used |= {columns.prompt, columns.question}
        question = _filled(_ALPACA_TEMPLATE, fields, faults)
        if columns.answer is not None and columns.answer not in fields:
            answer, answers = _answers(fields[_ALPACA_ANSWER], faults)
    elif form is not None:
        used |= {columns.prompt} if form == PREFERRED else {form, columns.prompt}
        messages = _read_messages(fields[form])
        if len(messages.roles) > 1 and messages.roles[-1] == "assistant":
            if columns.answer is not None and columns.answer not in fields and form != PREFERRED:
                answer = messages.contents[-1]
            messages = messages._replace(roles=messages.roles[:-1], contents=messages.contents[:-1])
    else:
        used |= {columns.prompt, columns.question}
        question = _question(fields, columns, faults) if columns.template is None else _filled(columns.template, fields, faults)
    faults.extend(messages.faults)
    extra = _extra(fields, used, faults)
    return RawRow(question, messages.roles or None, messages.contents or None, answer, extra, tuple(faults), text, answers, task)


def known_form(fields: Fields, columns: Columns) -> str | None:
    """The column by which a row of a well-known form asks, of CHAT_COLUMNS or ALPACA. It counts only where nothing else does."""
    if columns.template is not None or fields.get(columns.prompt) is not None or fields.get(columns.question) is not None:
        return None
    for name in CHAT_COLUMNS:
        given = fields.get(name)
        if isinstance(given, list) or (isinstance(given, str) and _is_json_list(given)):
            return name
    return ALPACA if isinstance(fields.get(ALPACA), str) and _ALPACA_ANSWER in fields else None


def chat_message(given: Any) -> Any:
    """A message of ShareGPT (from, value) with the keys role and content; anything else as it is."""
    if not isinstance(given, Mapping) or "role" in given or not {"from", "value"} <= given.keys():
        return given
    rest = {key: value for key, value in given.items() if key not in ("from", "value")}
    role = given["from"]
    return {"role": _ROLES_OF.get(role, role) if isinstance(role, str) else role, "content": given["value"], **rest}


def _read_messages(prompt: object) -> _Messages:
    # Text that is a JSON list, as in CSV cells.
    if isinstance(prompt, str) and _is_json_list(prompt):
        try:
            prompt = orjson.loads(prompt)
        except orjson.JSONDecodeError as error:
            return _Messages(faults=(Fault("prompt_not_list", f"{error}: {shorten(str(prompt))}"),))
    if not isinstance(prompt, list):
        return _Messages(faults=(Fault("prompt_not_list", short_json(prompt)),))
    if not prompt:
        return _Messages(faults=(Fault("messages_empty", "[]"),))
    roles: list[str] = []
    contents: list[str] = []
    extra = None
    for message in map(chat_message, prompt):
        try:
            role, content = message["role"], message["content"]
        except (KeyError, TypeError):
            role, content = None, None
        if isinstance(content, list):
            # Parts are joined as chat templates do.
            parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
            if not all(isinstance(part, str) for part in parts):
                return _Messages(faults=(Fault("message_not_text", short_json(message)),))
            content = "".join(map(str, parts))
        if not isinstance(role, str) or not isinstance(content, str):
            return _Messages(faults=(Fault("message_shape", short_json(message)),))
        # Parquet and hub data fill a key that only other rows use with null; that means absent.
        if len(message) > 2 and any(message[key] is not None for key in message.keys() - {"role", "content"}):
            extra = Fault("message_extra_keys", short_json(message))
        roles.append(role)
        contents.append(content)
    return _Messages(roles, contents, (extra,) if extra else ())


def short_json(value: object) -> str:
    """A value as shortened JSON; the name of its type when it has no JSON form."""
    try:
        return shorten(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode())
    except (TypeError, ValueError):
        return shorten(str(type(value).__name__))


def shorten(text: str, limit: int = 200) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _is_json_list(prompt: str) -> bool:
    # Not every prompt that begins with a bracket is a list: "[INST] ...", "[1, 2, 3] sorted is".
    return prompt.lstrip().startswith("[") and re.match(r"\s*\[\s*(?:\{|\]\s*$)", prompt) is not None


def _question(fields: Fields, columns: Columns, faults: list[Fault]) -> str | None:
    value = fields.get(columns.question)
    if isinstance(value, str):
        return value
    faults.append(Fault("prompt_missing", "null") if value is None else Fault("question_not_text", short_json(value)))
    return None


def _filled(template: str, fields: Fields, faults: list[Fault]) -> str | None:
    """The template with the values of its columns; their text is never taken for a template itself."""
    pieces, left_out = [], False
    for literal, name, _, _ in Formatter().parse(template):
        if name is not None and name not in fields and name.endswith(OPTIONAL):
            name = name.removesuffix(OPTIONAL)  # noqa: PLW2901
            if fields.get(name) in (None, ""):
                left_out = True
                pieces.append(literal)
                continue
        value = None if name is None else _as_text(fields.get(name))
        if name is not None and value is None:
            missing = fields.get(name) is None
            faults.append(Fault("prompt_missing" if missing else "question_not_text", f"{name}: {short_json(fields.get(name))}"))
            return None
        pieces += [literal, value or ""]
    return "".join(pieces).strip() if left_out else "".join(pieces)


def _answers(value: object, faults: list[Fault]) -> tuple[str | None, Sequence[str] | None]:
    """The answer as text; for a list its first answer, and all of them."""
    if value is None or isinstance(value, str):
        return value, None
    if not isinstance(value, list | tuple):
        text = _as_answer(value)
        if text is None:
            faults.append(Fault("answer_type", short_json(value)))
        return text, None
    texts = [_as_answer(one) for one in value]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        faults.append(Fault("answer_type", short_json(value)))
        return None, None
    return (known[0], known) if known else (None, None)


def _holds_object(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value))


def _as_answer(value: object) -> str | None:
    if not isinstance(value, Mapping):
        return _as_text(value)
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, ValueError):
        return None  # nested more than 254 levels deep


def _as_text(value: object) -> str | None:
    """A scalar as text; None for anything that has no single spelling."""
    if isinstance(value, str):
        return value
    # bool is a subclass of int in Python
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Decimal) and math.isfinite(value):
        # Normalisation does not recognise scientific notation (1e+22, 5E+1), so the digits are written out.
        return format(Decimal(repr(value)) if isinstance(value, float) else Decimal(value), "f")
    # datetime is a subclass of date
    return value.isoformat() if isinstance(value, date | time) else None


def _extra(fields: Fields, used: set[str | None], faults: list[Fault]) -> str:
    if fields.keys() <= used:
        return "{}"
    others = {key: value for key, value in fields.items() if key not in used}
    for name in [name for name, value in others.items() if _is_media(str(name), value)]:
        faults.append(Fault("media_with_text", f"column {name}"))
        del others[name]
    try:
        return orjson.dumps(others, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except (TypeError, ValueError):
        faults.append(Fault("unreadable_line", "a column is nested more than 254 levels deep"))
        return "{}"


def _is_media(name: str, value: object) -> bool:
    """Whether a value is an image, a sound or a video, or the path of one in a column that is called so."""
    if isinstance(value, str):
        return _MEDIA_NAME.search(name) is not None and _MEDIA_TEXT.match(value) is not None
    if isinstance(value, bytes):
        return value.startswith(_MEDIA_BYTES)
    if isinstance(value, Mapping):
        # As the library datasets stores images and sounds.
        path, stored = value.get("path"), value.get("bytes")
        return isinstance(stored, bytes) or ("bytes" in value and isinstance(path, str) and _MEDIA_TEXT.match(path) is not None)
    return isinstance(value, list) and any(_is_media(name, one) for one in value[:1])
