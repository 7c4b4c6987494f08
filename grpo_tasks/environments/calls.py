"""Reads the calls of a turn, by the format of the model family. A turn is hostile text: nothing here raises, and time is bounded.

    hermes  any text <tool_call>{"name": ..., "arguments": {...}}</tool_call> any text, several times (Qwen, Hermes, SmolLM)
    llama   nothing but {"name": ..., "parameters": {...}}, several after `;`, with or without <|python_tag|> before it
    json    as hermes where the tag occurs; otherwise nothing but the object, or a list of such objects

Without a tag an object is a call only with arguments, with parameters or with the name of a tool: an answer may be JSON too.
Calls inside a reasoning block do not count, open or closed. A call that cannot be read is a call with an error: the policy
reads it as an answer, and it counts.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from schemas.config.completion import THINK
from schemas.config.rollout import CallFormat
from schemas.errors import ConfigError

ReadFormat = Literal["hermes", "llama", "json"]
Message = dict[str, Any]

OPEN, CLOSE, PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"
END_MARKS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>")
"""Special tokens that end a turn. They are not part of its text."""
MOST_CALLS = 1024
"""Calls read in one turn. Later ones are counted only."""
MAX_CALL_CHARS = 262_144
MAX_ERROR_CHARS = 300
_FOREIGN = ("<function=", "<arg_key>", "[TOOL_CALLS]", "tool▁call", "<|tool_call|>", "<start_function_call>", "<|channel|>")
"""What the chat templates of other families write calls with."""
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


def call_format_of(call_format: CallFormat, chat_template: str) -> ReadFormat:
    """The format that the configuration names, or (auto) the one that a chat template asks for; ConfigError: it asks for none."""
    if call_format != "auto":
        return call_format
    place = "interaction.call_format"
    fix = "call_format: json, and say in the system prompt that a call is <tool_call>{JSON with name and arguments}</tool_call>"
    for mark in _FOREIGN:
        if mark in chat_template:
            raise ConfigError(f"the chat template of the model writes calls with {mark}, which is not read", place=place, fix=fix)
    if OPEN in chat_template:
        return "hermes"
    if PYTHON in chat_template or '"parameters"' in chat_template:
        return "llama"
    if not re.search(r"\btools\b", chat_template):
        fix = "use a model whose chat template shows tools, or describe them in the system prompt and set call_format: json"
        raise ConfigError("the chat template of the model does not show tools", place=place, fix=fix)
    return "json"


def read_turn(
    text: str,
    call_format: ReadFormat,
    *,
    reasoning: Sequence[str] = THINK,
    starts_inside: bool | None = None,
    tools: Sequence[str] = (),
) -> ParsedTurn:
    """The calls of a turn, in their order.

    `text` includes special tokens, and `tools` are the names of the tools. `reasoning` names the tags around reasoning.
    `starts_inside`: whether the prompt ends inside a block of the first of these tags, which the template opened. None: it is so
    when the first of the tags in the text is a closing one.
    """
    text, start = spoken(text), 0
    if starts_inside and reasoning:
        start = _after_block(text, 0, reasoning[0])
    elif starts_inside is None and reasoning:
        first = _markers(tuple(reasoning), False).search(text)
        start = first.end() if first and first[0].startswith("</") else 0
    if call_format != "hermes":
        turn = _bare(text, start, reasoning, tools)
        if turn.calls or call_format == "llama":
            return turn
    return _tagged(text, start, reasoning)


def write_call(name: str, arguments: Mapping[str, Any], call_format: ReadFormat) -> str:
    """A call as an honest policy writes it."""
    if call_format == "llama":
        return json.dumps({"name": name, "parameters": dict(arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': dict(arguments)}, ensure_ascii=False)}\n{CLOSE}"


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
def _markers(tags: tuple[str, ...], calls: bool) -> re.Pattern[str]:
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")] + ([OPEN] if calls else [])
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


def _after_block(text: str, start: int, tag: str) -> int:
    """The end of the reasoning block whose content begins at `start`."""
    depth = 1
    for mark in _markers((tag,), False).finditer(text, start):
        depth += -1 if mark[0].startswith("</") else 1
        if depth == 0:
            return mark.end()
    return len(text)


def _tagged(text: str, start: int, reasoning: Sequence[str]) -> ParsedTurn:
    calls: list[Call] = []
    pieces, kept, at = [], 0, start
    markers = _markers(tuple(reasoning), True)
    while found := markers.search(text, at):
        if found[0] != OPEN:
            at = found.end() if found[0].startswith("</") else _after_block(text, found.end(), found[0][1:-1])
            continue
        if len(calls) == MOST_CALLS:
            break
        call, at = _tagged_call(text, found.end())
        calls.append(call)
        pieces.append(text[kept : found.start()])
        kept = at
    unread = text.count(OPEN, at) if len(calls) == MOST_CALLS else 0
    content = "".join([*pieces, text[kept:]])
    return ParsedTurn(content.rstrip() if calls else content, tuple(calls), unread)


def _tagged_call(text: str, start: int) -> tuple[Call, int]:
    found, end, error = _decode(text, start)
    if error is None:
        after = _skip(text, end)
        if text.startswith(CLOSE, after):
            return _call_of(found), after + len(CLOSE)
        # A stop token may have taken the place of the closing tag.
        if after == len(text):
            return _call_of(found), after
        error = f"expected {CLOSE} after the JSON object"
    ends = [at for mark in (OPEN, CLOSE) if (at := text.find(mark, start)) >= 0]
    end = min(ends, default=len(text))
    return Call(error=error), end + len(CLOSE) if text.startswith(CLOSE, end) else end


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
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict):
        return Call(error="a call is a JSON object with name and arguments")
    name = found.get("name")
    if not isinstance(name, str) or not name:
        return Call(error="the call has no name")
    name = _printable(name)[:MAX_ERROR_CHARS]
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
        return None, start, f"not valid JSON: {_printable(str(error))[:MAX_ERROR_CHARS]}"
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


def _printable(text: str) -> str:
    """The text without lone surrogates, for which UTF-8 has no form."""
    return text.encode(errors="backslashreplace").decode()


class Checker:
    """Checks calls against the schemas of the tools, which are those of `apply_chat_template(tools=...)`."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        from jsonschema import Draft202012Validator
        from referencing import Registry

        self._parameters = {one["function"]["name"]: one["function"].get("parameters", {}) for one in schemas}
        # An empty registry fetches nothing.
        registry: Any = Registry()
        self._validators = {
            name: Draft202012Validator(_with_null(one), registry=registry) for name, one in self._parameters.items()
        }

    def check(self, call: Call) -> Call:
        """The call, with an error if there is no such tool or its arguments do not fit."""
        if call.error is not None:
            return call
        if call.name not in self._validators:
            return replace(call, error=f"there is no tool {call.name}; tools: {', '.join(self._validators)}"[:MAX_ERROR_CHARS])
        known = self._parameters[call.name].get("properties", {})
        unknown = next((name for name in call.arguments if name not in known), None)
        if unknown is not None:
            error = f"{call.name} has no argument {_printable(unknown)[:100]}; arguments: {', '.join(known) or 'none'}"
            return replace(call, error=error[:MAX_ERROR_CHARS])
        try:
            wrong = next(self._validators[call.name].iter_errors(call.arguments), None)
        except (RecursionError, ArithmeticError):
            return replace(call, error="the arguments are nested too deeply")
        if wrong is None:
            return call
        # The message repeats the value, which may be long.
        where = ".".join(map(str, wrong.absolute_path))[:100]
        message = _printable(wrong.message)
        message = message if len(message) <= MAX_ERROR_CHARS else f"{message[:100]} ... {message[-150:]}"
        return replace(call, error=f"{call.name}: {where + ': ' if where else ''}{message}")


def _with_null(schema: Any) -> Any:
    """The schema as JSON Schema has it: transformers writes `nullable` for `| None`."""
    if isinstance(schema, list):
        return [_with_null(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _with_null(value) for key, value in schema.items() if key not in ("nullable", "enum", "properties")}
    if "enum" in schema:
        made["enum"] = schema["enum"]
    if "properties" in schema:
        # The keys below are names of arguments, whatever they are.
        made["properties"] = {name: _with_null(one) for name, one in schema["properties"].items()}
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") is True else made
