"""Reads the calls of a turn, by the format of the model family. A turn is hostile text: nothing here raises, and time is bounded.

families.py says where calls stand, and transformers reads each of them. This file finds them, keeps the bounds, and turns what
cannot be read into a call with an error: the policy reads that as an answer, and it counts. checker.py compares calls with tools.

Calls inside a reasoning block do not count, open or closed. Without a tag an object is a call only with arguments, with
parameters or with the name of a tool: an answer may be JSON too.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from grpo_tasks.environments.families import CallField, CallFields, ReadFormat, fields_of
from schemas.config.completion import THINK

Message = dict[str, Any]

PYTHON = "<|python_tag|>"
END_MARKS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|call|>", "<|return|>",
    "<|observation|>", "<end_of_turn>", "</s>",
)  # fmt: skip
"""Special tokens that end a turn. They are not part of its text."""
MOST_CALLS = 1024
"""Calls read in one turn. Later ones are counted only."""
MOST_DAMAGED = 64
"""Unreadable calls of one turn, each of which may cost a look through all of it. Calls after them are counted only."""
MAX_CALL_CHARS = 262_144
MAX_DIALECT_CHARS = 32_768
"""Characters of a call in a dialect of JSON, which transformers reads in quadratic time."""
MAX_ERROR_CHARS = 300
READ_S = 5.0
"""CPU seconds for the patterns in one turn: those of a stranger's response template need not end. Those of the families take less
than one."""
_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Call:
    """One call."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why it cannot be executed."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One turn of the policy, as it was understood."""

    content: str
    """The text outside the calls, reasoning included."""
    calls: tuple[Call, ...] = ()
    num_unread: int = 0
    """Further calls, beyond MOST_CALLS."""

    def message(self) -> Message:
        """The turn as a message of a chat."""
        made: Message = {"role": "assistant", "content": self.content}
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in self.calls
            if call.name
        ]
        return made | {"tool_calls": calls} if calls else made


def read_turn(
    text: str,
    call_format: ReadFormat | CallFields,
    *,
    reasoning: Sequence[str] = THINK,
    starts_inside: bool | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> ParsedTurn:
    """The calls of a turn, in their order.

    `text` includes special tokens. `tools` are the schemas of the tools: where a format writes arguments as text, they say what
    becomes a number. `reasoning` names the tags around reasoning. `starts_inside`: whether the prompt ends inside a block of the
    first of these tags, which the template opened. None: it is so when the first of the tags in the text is a closing one.
    """
    text, start = spoken(text), 0
    if starts_inside and reasoning:
        start = _after_block(text, 0, reasoning[0])
    elif starts_inside is None and reasoning:
        first = _markers(tuple(reasoning)).search(text)
        start = first.end() if first and first[0].startswith("</") else 0
    if call_format in ("llama", "json"):
        turn = _bare(text, start, reasoning, [one["function"]["name"] for one in tools])
        if turn.calls or call_format == "llama":
            return turn
    fields = call_format if isinstance(call_format, CallFields) else fields_of(call_format)
    return _Reader(text, fields, tuple(reasoning), tools).read(start)


def spoken(text: str) -> str:
    """The text of a turn without the special tokens that end it."""
    end = len(text)
    while True:
        last = end
        # By position: a slice for each of a million marks would take quadratic time.
        while end and text[end - 1] in _SPACE:
            end -= 1
        mark = next((mark for mark in END_MARKS if text.endswith(mark, 0, end)), None)
        if mark is None:
            return text[:last]
        end -= len(mark)


@lru_cache(maxsize=64)
def _markers(tags: tuple[str, ...]) -> re.Pattern[str]:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def _after_block(text: str, start: int, tag: str) -> int:
    """The end of the reasoning block whose content begins at `start`."""
    depth = 1
    for mark in _markers((tag,)).finditer(text, start):
        depth += -1 if mark[0].startswith("</") else 1
        if depth == 0:
            return mark.end()
    return len(text)


class _Reader:
    """Reads the calls of one turn by a response template, whose patterns may be a stranger's."""

    def __init__(self, text: str, fields: CallFields, reasoning: tuple[str, ...], tools: Sequence[Mapping[str, Any]]) -> None:
        self._text, self._tools, self._strict = text, list(tools), fields.strict
        self._until = time.thread_time() + READ_S
        calls = [(one, one.field.open_re) for one in fields.calls]
        self._kinds: list[tuple[Any, Any]] = [(None, _markers(reasoning)), *calls, *((one, one.open_re) for one in fields.others)]
        self._ahead: dict[int, Any] = {}

    def read(self, start: int) -> ParsedTurn:
        calls: list[Call] = []
        pieces, kept, at, unread, damaged = [], 0, start, 0, 0
        try:
            while found := self._next(at):
                kind, opened = found
                if isinstance(kind, CallField) and len(calls) < MOST_CALLS and damaged < MOST_DAMAGED:
                    made, at = self._region(kind, opened)
                    calls += made
                    damaged += any(call.error is not None for call in made)
                    pieces.append(self._text[kept : opened.start()])
                    kept = at
                elif isinstance(kind, CallField):
                    unread, at = unread + 1, opened.end()
                elif kind is not None:
                    closed = self._search(kind.close_re, opened.end())
                    at = closed.end() if closed else len(self._text)
                elif opened[0].startswith("</"):
                    at = opened.end()
                else:
                    at = _after_block(self._text, opened.end(), opened[0][1:-1])
                # An opening may be empty.
                at = max(at, opened.start() + 1)
        except TimeoutError:
            calls.append(Call(error=f"the calls of the turn cannot be read within {READ_S:g} s of CPU time"))
        content = "".join([*pieces, self._text[kept:]])
        unread += max(0, len(calls) - MOST_CALLS)
        return ParsedTurn(content.rstrip() if calls else content, tuple(calls[:MOST_CALLS]), unread)

    def _next(self, at: int) -> tuple[Any, Any] | None:
        """What comes next, and where: the field that opens, or None for a tag of reasoning."""
        found = []
        for number, (kind, pattern) in enumerate(self._kinds):
            # A match that lies ahead is kept, so that a million openings take linear time.
            if number not in self._ahead or (self._ahead[number] and self._ahead[number].start() < at):
                self._ahead[number] = self._search(pattern, at) if kind is not None else pattern.search(self._text, at)
            if match := self._ahead[number]:
                found.append((match.start(), -match.end(), number))
        if not found:
            return None
        *_, number = min(found)
        return self._kinds[number][0], self._ahead[number]

    def _region(self, kind: CallField, opened: Any) -> tuple[list[Call], int]:
        """The calls of a region, mostly one, and where the region ends."""
        begin = opened.end()
        after, end, error = self._json_extent(kind, begin) if kind.is_plain_json else self._extent(kind, begin)
        limit = MAX_DIALECT_CHARS if kind.field.content == "json" and not kind.is_plain_json else MAX_CALL_CHARS
        if error is None and after - begin > limit:
            error = f"the call has {after - begin:,} characters, and {limit:,} are the limit"
        if error is None:
            return self._parsed(kind, opened.start(), begin, after), end
        name = opened.groupdict().get("name") or ""
        return [Call(printable(name)[:MAX_ERROR_CHARS], error=error)], end

    def _json_extent(self, kind: CallField, begin: int) -> tuple[int, int, str | None]:
        """Where the JSON ends, where the region ends, and what is wrong. A marker inside its strings is text."""
        _, after, error = _decode(self._text, begin)
        here, close = _skip(self._text, after), kind.field.close_re
        if error is None and (close is None or here == len(self._text)):
            # At the end of a turn a stop token may have taken the place of the closing tag.
            return after, here, None
        if error is None and (closed := close.match(self._text, here, timeout=self._left())):
            return after, closed.end(), None
        again, closed = self._search(kind.field.open_re, begin), self._search(close, begin)
        end = min([*([again.start()] if again else []), *([closed.end()] if closed else [])], default=len(self._text))
        return begin, end, error or f"expected {(kind.field.close_literals or ['the end of the call'])[0]} after the JSON object"

    def _extent(self, kind: CallField, begin: int) -> tuple[int, int, str | None]:
        """As transformers has it: a region reaches to the first closing, whatever is in between."""
        if kind.field.close_re is None:
            return len(self._text), len(self._text), None
        closed = self._search(kind.field.close_re, begin)
        again = self._search(kind.field.open_re, begin) if self._strict else None
        if closed and not (again and again.start() < closed.start()):
            return closed.start(), closed.end(), None
        return begin, again.start() if again else len(self._text), "the call is not closed"

    def _parsed(self, kind: CallField, start: int, begin: int, after: int) -> list[Call]:
        from transformers.utils.chat_parsing import parse_response

        try:
            # transformers sets no time limit. What ends here ends there too.
            for _ in kind.tag.finditer(self._text, begin, after, timeout=self._left()) if kind.tag is not None else ():
                pass
            # A value of JSON has its type. Where values are text, the schemas of the tools say what they are.
            tools = None if kind.field.content == "json" else self._tools
            found = parse_response(self._text[start:after], kind.alone, prefix="", tools=tools).get(kind.field.name)
            if found is None:
                raise ValueError("its opening is none without the text before it")
            if not kind.is_plain_json:
                json.dumps(found, allow_nan=False)
        except TimeoutError:
            raise
        except RecursionError:
            return [Call(error="the arguments are nested too deeply")]
        except KeyError:
            return [Call(error="the call has no name")]
        except Exception as error:  # a stranger's template is a program: it can fail in any way
            first = printable(str(error)).partition("\n")[0]
            return [Call(error=f"the call cannot be read: {first}"[:MAX_ERROR_CHARS])]
        return [_call_of(one) for one in _flat(found)]

    def _search(self, pattern: Any, at: int) -> Any:
        return pattern.search(self._text, at, timeout=self._left()) if pattern is not None else None

    def _left(self) -> float:
        return max(self._until - time.thread_time(), 0.001)


def _flat(found: Any) -> Iterator[Any]:
    if isinstance(found, list):
        for one in found:
            yield from _flat(one)
    elif found is not None:
        yield found


def _bare(text: str, start: int, reasoning: Sequence[str], tools: Sequence[str]) -> ParsedTurn:
    at = _skip(text, start)
    openings = {f"<{tag}>": tag for tag in reasoning}
    while opening := next((mark for mark in openings if text.startswith(mark, at)), None):
        at = _skip(text, _after_block(text, at + len(opening), openings[opening]))
    tagged = text.startswith(PYTHON, at)
    here = _skip(text, at + len(PYTHON)) if tagged else at
    meant = _begins_like_a_call(text, here, tools)
    calls: list[Call] = []
    while here < len(text) and len(calls) < MOST_CALLS:
        found, here, error = _decode(text, here)
        some = found if isinstance(found, list) else [found]
        if error is not None:
            calls.append(Call(error=error))
            here, meant = len(text), meant or tagged
        # Only what looks like a call is one: an answer may be a JSON object too, or begin with one.
        elif tagged or all(_is_call(one, tools) for one in some):
            calls += map(_call_of, some)
            meant = True
            here = _skip(text, here, ";,")
        else:
            return ParsedTurn(text)
    if not calls or not meant:
        return ParsedTurn(text)
    unread = text.count('"name"', here) + max(0, len(calls) - MOST_CALLS)
    return ParsedTurn(text[:at].rstrip(), tuple(calls[:MOST_CALLS]), unread)


def _is_call(found: Any, tools: Sequence[str]) -> bool:
    if not isinstance(found, dict) or not found.keys() <= {"name", "type", "function", "id", *_ARGUMENTS}:
        return False
    call = found.get("function") or found
    if not isinstance(call, dict) or "name" not in call:
        return False
    # {"name": "Paris"} is an answer.
    return found.get("type") == "function" or not call.keys().isdisjoint(_ARGUMENTS) or call["name"] in tools


def _begins_like_a_call(text: str, at: int, tools: Sequence[str]) -> bool:
    """Whether text that is no JSON was meant as a call."""
    head = "".join(text[at : at + 64].split()).removeprefix("[")
    if not head.startswith('{"name":"'):
        return head.startswith('{"type":"function"')
    name = head[len('{"name":"') :].partition('"')[0]
    return name in tools or any(f'"{key}"' in text for key in _ARGUMENTS)


def _skip(text: str, at: int, more: str = "") -> int:
    skipped = _SPACE + more
    while at < len(text) and text[at] in skipped:
        at += 1
    return at


def _call_of(found: Any) -> Call:
    while isinstance(found, dict) and "function" in found and "name" not in found:
        found = found["function"]
    if not isinstance(found, dict):
        return Call(error="a call is a JSON object with name and arguments")
    name = found.get("name")
    if not isinstance(name, str) or not name:
        return Call(error="the call has no name")
    name = printable(name)[:MAX_ERROR_CHARS]
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):
        inner, end, error = _decode(arguments, 0)
        if error is not None or _skip(arguments, end) < len(arguments):
            return Call(name, error="the arguments are not a JSON object")
        arguments = inner
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return Call(name, error="the arguments are not a JSON object")
    return Call(name, arguments)


def _decode(text: str, start: int) -> tuple[Any, int, str | None]:
    """The JSON value at `start`, where it ends, and what is wrong with it."""
    start = _skip(text, start)
    try:
        found, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        return None, start, "the JSON is nested too deeply"
    except json.JSONDecodeError as error:
        # Not the position: it would depend on text before the call.
        return None, start, f"not valid JSON: {error.msg}"
    except ValueError as error:
        return None, start, f"not valid JSON: {printable(str(error))[:MAX_ERROR_CHARS]}"
    if end - start > MAX_CALL_CHARS:
        return None, end, f"the call has {end - start:,} characters, and {MAX_CALL_CHARS:,} are the limit"
    return found, end, None


def _finite(text: str) -> float:
    if text in ("NaN", "Infinity", "-Infinity"):
        raise ValueError(f"{text} is not a JSON number")
    if not math.isfinite(number := float(text)):
        raise ValueError("a number is not finite")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def printable(text: str) -> str:
    """The text without lone surrogates, for which UTF-8 has no form."""
    return text.encode(errors="backslashreplace").decode()
