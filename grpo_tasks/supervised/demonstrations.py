"""Rows of the data -> demonstrations as tokens; the others are counted, named with their line and left out.

    row --column or function--> text or messages --checks--> turns --turns.py--> token ids

A refused row is no crash: the run goes on as long as `max_invalid_fraction` allows, and stops before the model is loaded
otherwise. Texts are data: they are never executed, and one that contains a marker of the chat template is refused, because it
could open a turn of its own.
"""

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.places import row_place
from grpo_tasks.content.tokenizer import contains_special, special_tokens
from grpo_tasks.content.user_objects import import_object
from grpo_tasks.data.table import PromptRow
from grpo_tasks.supervised.turns import Demonstration, Turn, UnusableError, encode_turns
from schemas.config.learning.kinds import DemonstrationsConfig
from schemas.errors import ConfigError, DataError

REFUSED = "refused_demonstrations.jsonl"
"""File of the stage directory that names every refused row."""
_ROLES = ("user", "assistant", "tool")
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}
_SHOWN = 3
"""Refused rows that the error names; the file names all."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row without a usable demonstration."""

    row: PromptRow
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{row_place(self.row.source, self.row.line)}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The rows that have a demonstration, in reading order, and those that have none."""

    rows: list[PromptRow]
    tokens: list[Demonstration]
    """One for each of `rows`: several rows may have one prompt, and solutions of their own."""
    refused: list[Refusal]

    def summary(self) -> str:
        """How many rows are left out and why, in one line; empty when none is."""
        reasons = Counter(refusal.reason for refusal in self.refused).most_common()
        counts = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
        return f"{len(self.refused):,} of {len(self.refused) + len(self.rows):,} rows are left out ({counts})" if counts else ""

    def write(self, path: Path) -> None:
        """Write every refused row with its line and its reason; no file when there is none."""
        lines = [
            {
                "source": one.row.source,
                "line": one.row.line,
                "prompt_id": one.row.prompt_id,
                "reason": one.reason,
                "detail": one.detail,
            }
            for one in self.refused
        ]
        if lines:
            path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def read_demonstrations(
    rows: Sequence[PromptRow], settings: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int
) -> Demonstrations:
    """The demonstrations of rows.

    Args:
        rows: accepted training rows.
        settings: where the demonstrations come from.
        tokenizer: the policy's, with its chat template.
        max_tokens: longest demonstration, if the settings name none.

    Raises:
        ConfigError: no row has the column, or the function cannot be imported.
    """
    find = _finder(rows, settings)
    limit = settings.max_tokens or max_tokens
    markers = sorted(special_tokens(tokenizer).values())
    usable: list[PromptRow] = []
    tokens: list[Demonstration] = []
    refused: list[Refusal] = []
    for row in rows:
        try:
            turns = _turns(row, find(row))
            _check_texts(turns, markers)
            made = encode_turns(tokenizer, row.messages, turns)
            if len(made.token_ids) > limit:
                raise UnusableError("too_long", f"{len(made.token_ids):,} tokens, more than {limit:,}")
        except UnusableError as error:
            refused.append(Refusal(row, error.reason, error.detail))
            continue
        usable.append(row)
        tokens.append(made)
    return Demonstrations(usable, tokens, refused)


def check_share(found: Demonstrations, settings: DemonstrationsConfig, *, stage: str, listed: Path) -> None:
    """Refuse to train when too many rows have no demonstration.

    Raises:
        DataError: with the counts, the first refused rows and the file that names all.
    """
    total = len(found.rows) + len(found.refused)
    if found.rows and len(found.refused) <= settings.max_invalid_fraction * total:
        return
    first = "; ".join(map(str, found.refused[:_SHOWN]))
    raise DataError(
        f"{found.summary()}, more than demonstrations.max_invalid_fraction {settings.max_invalid_fraction:g}: {first}",
        place=f"stage {stage}, demonstrations",
        fix=f"correct these rows ({listed} names all), or raise max_invalid_fraction",
    )


def _finder(rows: Sequence[PromptRow], settings: DemonstrationsConfig) -> Callable[[PromptRow], Any]:
    """What gives the demonstration of a row, unchecked."""
    if settings.function is not None:
        return _caller(settings.function, settings.module_dirs())
    column = str(settings.column)
    if column == "answer":
        return lambda row: row.extra.get(column, row.answer)
    known = sorted({name for row in rows for name in row.extra})
    if column not in known:
        raise ConfigError(
            f"no row has the column {column}",
            place="demonstrations.column",
            fix=f"name one of {', '.join(['answer', *known][:20])}",
        )
    return lambda row: row.extra.get(column)


def _caller(path: str, folders: Iterable[Path]) -> Callable[[PromptRow], Any]:
    for folder in folders:
        # Behind the installed packages, as for reward functions.
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    function = import_object(path, list(folders), place="demonstrations.function")

    def call(row: PromptRow) -> Any:
        try:
            return function(_as_dict(row))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            raise UnusableError("function_error", f"{path} raised {type(error).__name__} at {place}: {error}"[:300]) from error

    return call


def _as_dict(row: PromptRow) -> dict[str, Any]:
    prompt = row.messages[0]["content"] if row.plain else [dict(message) for message in row.messages]
    return {**row.extra, "prompt": prompt, "answer": row.answer if row.answers is None else list(row.answers)}


def _turns(row: PromptRow, given: object) -> list[Turn]:
    """The messages after the prompt, with at least one turn of the assistant, the last one."""
    if given is None:
        raise UnusableError("missing", "there is no demonstration")
    if isinstance(given, str):
        given = [{"role": "assistant", "content": given}]
    if not isinstance(given, list) or not all(isinstance(turn, Mapping) for turn in given):
        raise UnusableError("not_messages", f"the demonstration is {type(given).__name__}, neither a text nor chat messages")
    turns = _without_prompt(row, given)
    for turn in turns:
        _check_turn(turn, row)
    last = max((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), default=None)
    if last is None:
        raise UnusableError("no_assistant_turn", "the demonstration has no turn of the assistant")
    return turns[: last + 1]


def _without_prompt(row: PromptRow, turns: Sequence[Turn]) -> list[Turn]:
    """The turns without the prompt, which a column of complete conversations repeats."""
    prompt = [dict(message) for message in row.messages]
    plain = [{"role": turn.get("role"), "content": turn.get("content")} for turn in turns]
    # A system prompt of the config stands in the prompt and not in the data.
    for begin in (prompt, [message for message in prompt if message["role"] != "system"]):
        if begin and plain[: len(begin)] == begin:
            return list(turns[len(begin) :])
    return list(turns)


def _check_turn(turn: Turn, row: PromptRow) -> None:
    role, content, calls = turn.get("role"), turn.get("content"), turn.get("tool_calls")
    if role not in _ROLES or not turn.keys() <= _KEYS:
        raise UnusableError("not_messages", f"a message has the role {str(role)[:40]!r} and the keys {sorted(turn)[:8]}"[:300])
    if row.plain and role != "assistant":
        raise UnusableError("not_messages", "a plain prompt is continued by a text, not by a conversation")
    if not isinstance(content, str) and not (content is None and calls):
        raise UnusableError("not_messages", f"the content of a message is {type(content).__name__}, not a text")
    if role == "assistant" and not calls and not str(content).strip():
        raise UnusableError("empty", "a turn of the assistant is empty")


def _check_texts(turns: Sequence[Turn], markers: Sequence[str]) -> None:
    for turn in turns:
        # Tool calls are rendered by the template too.
        text = json.dumps(dict(turn), ensure_ascii=False, default=str)
        if contains_special(str(turn.get("content") or ""), markers) or contains_special(text, markers):
            found = next(marker for marker in markers if marker in text or marker in str(turn.get("content")))
            raise UnusableError("chat_marker", f"a message contains the special token {found}")
