"""Rows of the data -> demonstrations as tokens; the others are counted, named with their line and left out.

Texts are data: one that contains a marker of the chat template is refused, because it could open a turn of its own.

A stage of kind sft reads them when it starts. `python -m grpo_tasks.data.demonstrations DIRECTORY` does so for the lab, before
anything expensive: a process of its own, because a function may make them.
"""

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.limited_model import limited_templates
from grpo_tasks.content.modules import import_object
from grpo_tasks.content.places import row_place
from grpo_tasks.content.tokenizer import (
    RefusedError,
    add_tokens,
    added_tokens,
    contains_special,
    end_marker,
    prompt_ids,
    rendered,
    set_template_defaults,
    special_tokens,
    turn_end,
)
from grpo_tasks.data.records import chat_message
from grpo_tasks.data.table import read_prompts
from grpo_tasks.processes.child import SPEC, run_child
from schemas.config.model import ModelConfig
from schemas.config.stage import DemonstrationsConfig
from schemas.errors import ConfigError, DataError
from schemas.prompts import PLAIN, PromptRow
from schemas.results.base import Result

_SHOWN_TURNS = 80
"""Characters of a text that an error shows."""
Turn = Mapping[str, Any]
"""A chat message: role and content, and what else a template knows, such as tool_calls."""

REFUSED = "refused_demonstrations.jsonl"
"""Names every refused row, in the folder of the stage, or of the lab that was first to read them."""
_ROLES = ("user", "assistant", "tool")
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}
_SHOWN = 3
"""Refused rows that the error names; the file names all."""


class UnusableError(Exception):
    """A demonstration that cannot be trained on."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What continues a prompt, as tokens."""

    prompt: list[int]
    token_ids: list[int]
    """Of everything after the prompt."""
    trained: list[bool]
    """For each of `token_ids` whether the assistant wrote it."""
    text: str
    """What the assistant wrote."""


def encode_turns(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Turn], turns: Sequence[Turn]) -> Demonstration:
    """Tokens of a prompt and the turns that follow it; UnusableError where the chat template does not write them as they are.

        prompt | said <end> | \\n user ... assistant | said <end>
                 1   1   1    0  0        0           1    1   1      trained

    The prompt is tokenised as sampling does it, and each later part by itself, so what is trained on follows the prompt as a
    completion would. A turn includes its end marker: the policy learns to stop.
    """
    said = [str(turn.get("content") or "") for turn in turns if turn["role"] == "assistant"]
    ids, trained = [], []
    if prompt[0]["role"] == PLAIN:
        ids = tokenizer("".join(said), add_special_tokens=False)["input_ids"] + _end(tokenizer)
        trained = [True] * len(ids)
    else:
        for text, mine in _parts(tokenizer, prompt, turns):
            more = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            # A template without an end marker leaves the policy without a way to stop.
            more += _end(tokenizer) if mine and not end_marker(tokenizer, text) else []
            ids += more
            trained += [mine] * len(more)
    return Demonstration(prompt_ids(tokenizer, prompt), ids, trained, "\n\n".join(said))


def _parts(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Turn], turns: Sequence[Turn]) -> list[tuple[str, bool]]:
    """Texts after the prompt, each with whether the assistant wrote it; nothing after its last turn."""
    written, end = _render(tokenizer, prompt, opened=True), turn_end(tokenizer)
    parts: list[tuple[str, bool]] = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = _render(tokenizer, [*prompt, *turns[:index]], opened=True)
        after = _render(tokenizer, [*prompt, *turns[: index + 1]], opened=False)
        if not before.startswith(written):
            raise UnusableError("template", "the chat template writes earlier turns differently once more follow")
        if not after.startswith(before):
            opening = before.removeprefix(_render(tokenizer, [*prompt, *turns[:index]], opened=False))
            raise UnusableError(
                "template",
                f"the chat template itself opens the turn with {_short(opening)}, and begins a finished turn otherwise, so the "
                "demonstration would not follow its prompt; use a template that writes both alike",
            )
        said = after[len(before) :]
        marker = end if end is not None and end in said else end_marker(tokenizer, said)
        if marker:
            said = said[: said.index(marker) + len(marker)]
        _check_complete(turn, said)
        parts += [(before[len(written) :], False), (said, True)]
        written = before + said
    return parts


def _check_complete(turn: Turn, said: str) -> None:
    content, written = str(turn.get("content") or ""), "".join(said.split())
    # Only whitespace may differ.
    if "".join(content.split()) in written:
        return
    thought, tag, answer = content.rpartition("</think>")
    keeps_answer = bool(tag and thought) and "".join(answer.split()) in written
    what = f"what stands before {tag}" if keeps_answer else "a part"
    raise UnusableError(
        "cut_by_template",
        f"the chat template leaves out {what}: of {len(content):,} characters it writes {_short(said)}; use a template that "
        "keeps them, for example by rollout.chat_template_kwargs, or demonstrations without them",
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_TURNS else f"{text[: _SHOWN_TURNS - 1]}…")


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Turn], *, opened: bool) -> str:
    try:
        return rendered(tokenizer, messages, opened=opened)
    except RefusedError as error:
        raise UnusableError("template", str(error)) from error


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


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
    refused: list[Refusal]

    def summary(self) -> str:
        """How many rows are left out and why, in one line; empty when none is."""
        reasons = Counter(refusal.reason for refusal in self.refused).most_common()
        counts = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
        return f"{len(self.refused):,} of {len(self.refused) + len(self.rows):,} rows are left out ({counts})" if counts else ""

    def write(self, path: Path) -> None:
        """Write every refused row with its line and its reason; no file when there is none."""
        lines = []
        for one in self.refused:
            place = {"source": one.row.source, "line": one.row.line, "prompt_id": one.row.prompt_id}
            lines.append(json.dumps(place | {"reason": one.reason, "detail": one.detail}))
        if lines:
            path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def read_demonstrations(
    rows: Sequence[PromptRow], settings: DemonstrationsConfig, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int
) -> Demonstrations:
    """The demonstrations of accepted rows; ConfigError where no row has the column, or the function cannot be imported."""
    find = _finder(rows, settings)
    limit = settings.max_tokens or max_tokens
    markers = sorted(special_tokens(tokenizer).values())
    usable: list[PromptRow] = []
    tokens: list[Demonstration] = []
    refused: list[Refusal] = []
    for row in rows:
        try:
            turns = _turns(row, find(row))
            for turn in turns:
                # Tool calls are rendered by the template too.
                texts = (str(turn.get("content") or ""), json.dumps(dict(turn), ensure_ascii=False, default=str))
                if any(contains_special(text, markers) for text in texts):
                    found = next(marker for marker in markers if any(marker in text for text in texts))
                    raise UnusableError("chat_marker", f"a message contains the special token {found}")
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
    """DataError when too many rows have no demonstration."""
    total = len(found.rows) + len(found.refused)
    if found.rows and len(found.refused) <= settings.max_invalid_fraction * total:
        return
    first = "; ".join(map(str, found.refused[:_SHOWN]))
    too_long = sum(refusal.reason == "too_long" for refusal in found.refused)
    fix = f"correct these rows ({listed} names all), or raise max_invalid_fraction"
    if 2 * too_long > len(found.refused):
        fix = f"raise demonstrations.max_tokens, or rollout.max_completion_length; {listed} names all rows"
    raise DataError(
        f"{found.summary()}, more than demonstrations.max_invalid_fraction {settings.max_invalid_fraction:g}: {first}",
        place=f"stage {stage}, demonstrations",
        fix=fix,
    )


def _finder(rows: Sequence[PromptRow], settings: DemonstrationsConfig) -> Callable[[PromptRow], Any]:
    """What gives the demonstration of a row, unchecked."""
    path, folders = settings.function, settings.module_dirs()
    if path is not None:
        # Behind the installed packages, as for reward functions.
        sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]
        function = import_object(path, list(folders), place="demonstrations.function")

        def call(row: PromptRow) -> Any:
            prompt = row.messages[0]["content"] if row.plain else [dict(message) for message in row.messages]
            try:
                return function({**row.extra, "prompt": prompt, "answer": row.given_answer})
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(last.filename).name}:{last.lineno}"
                detail = f"{path} raised {type(error).__name__} at {place}: {error}"[:300]
                raise UnusableError("function_error", detail) from error

        return call
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


def _turns(row: PromptRow, given: object) -> list[Turn]:
    """The messages after the prompt, up to the last turn of the assistant."""
    if given is None:
        raise UnusableError("missing", "there is no demonstration")
    if isinstance(given, str):
        given = [{"role": "assistant", "content": given}]
    given = [chat_message(turn) for turn in (given if isinstance(given, list) else [given])]
    if not all(isinstance(turn, Mapping) for turn in given):
        raise UnusableError("not_messages", f"the demonstration is {type(given[0]).__name__}, neither a text nor chat messages")
    turns, plain = list(given), [{"role": turn.get("role"), "content": turn.get("content")} for turn in given]
    prompt = [dict(message) for message in row.messages]
    # A column of complete conversations repeats the prompt; a system prompt of the config stands in the prompt only.
    for begin in (prompt, [message for message in prompt if message["role"] != "system"]):
        if begin and plain[: len(begin)] == begin:
            turns = turns[len(begin) :]
            break
    for turn in turns:
        _check_turn(turn, row)
    last = max((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), default=None)
    if last is None:
        raise UnusableError("no_assistant_turn", "the demonstration has no turn of the assistant")
    return turns[: last + 1]


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


class DemonstrationsSpec(Result):
    """What the process that only reads demonstrations is given, as spec.json."""

    stage: str
    settings: DemonstrationsConfig
    max_tokens: int
    model: ModelConfig
    template: dict[str, Any]
    """Variables of the chat template."""
    train: Path
    """Accepted rows (schemas/tables.py Prompts)."""


def main(directory: Path) -> None:
    """Read all demonstrations of a stage; DataError when too many rows have none."""
    # polars, which the training process imports nowhere: a GPU machine may lack it.
    from grpo_tasks.data.chat_tokens import load_counter

    spec = DemonstrationsSpec.load(directory / SPEC)
    rows = read_prompts(spec.train)
    tokenizer = load_counter(spec.model, chats=not rows[0].plain).tokenizer
    add_tokens(tokenizer, added_tokens(spec.model))
    set_template_defaults(tokenizer, spec.template)
    with limited_templates(spec.model.path):
        found = read_demonstrations(rows, spec.settings, tokenizer, max_tokens=spec.max_tokens)
    found.write(directory / REFUSED)
    check_share(found, spec.settings, stage=spec.stage, listed=directory / REFUSED)


if __name__ == "__main__":
    run_child(main)
