"""Which text of a completion is its answer: the one definition that rewards, evaluation and the lab share.

    completion.format   what is read                                                          where
    tags                <answer>...</answer>, after <reasoning>...</reasoning>                  tags.py
    json                the value of a key of a JSON object                                   `read_json`
    regex               a group of the last match of a pattern                                `read_pattern`
    boxed               the last \\boxed{...}                                                  `read_boxed`
    none                free text: no answer                                                  here

An empty answer never earns anything. Blank text (only whitespace, control, format and filler characters) is never extracted and
equals nothing, and every built-in reward gives its lowest score when `Extraction.worthless` is set. Every reader takes time
linear in the text and never raises.
"""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from grpo_tasks.answers.extraction import Extraction, is_blank, last_number
from grpo_tasks.answers.json_rules import check_schema, fits_schema
from grpo_tasks.answers.tags import Tags, read_tags
from schemas.config.completion import CompletionConfig
from schemas.errors import ConfigError

BOX = "\\boxed{"
MAX_JSON_CHARS = 100_000
"""A longer text is no JSON object. It bounds the time and memory of the parser and of the schema's checks."""
MAX_DEPTH = 32
"""Deepest nesting of an object."""
FENCE = "```"
JsonObject = dict[str, Any]
SEARCHED_CHARS = 20_000
"""Characters at the end of a completion in which the pattern is searched."""
# Private characters that mark each match in the text. They are removed from the completion first.
_OPENED, _CLOSED = "\ue000", "\ue001"


def extract(text: str, completion: CompletionConfig) -> Extraction:
    """Read one completion in the format of the configuration. Never raises, whatever the text."""
    if completion.format == "json":
        return read_json(text, completion)
    if completion.format == "regex":
        return read_pattern(text, completion.pattern or "")
    if completion.format == "boxed":
        return read_boxed(text)
    if completion.format == "none":
        return _free_text(text)
    return read_tags(text, Tags.of(completion.tags))


def check_completion(completion: CompletionConfig) -> None:
    """Raise `ConfigError` for a pattern or a JSON Schema that cannot be used. Reading a config does not import what can tell."""
    if completion.pattern is not None:
        check_pattern(completion.pattern)
    if completion.json_schema is not None:
        check_schema(completion.json_schema)


def _free_text(text: str) -> Extraction:
    blank = is_blank(text)
    return Extraction(answer=None, strict_format=not blank, lenient_answer=None, empty_answer=blank)


def read_boxed(text: str) -> Extraction:
    """Read one completion by the rules of this module, in time linear in its length.

    The format is kept by a box whose last one is closed (braces balanced; `\\{` and `\\}` do not count) and not blank. Only the
    last box counts, so several gain nothing. The lenient answer is the same, or the last number where there is no box.
    """
    start = text.rfind(BOX)
    end = _closing_brace(text, start + len(BOX)) if start >= 0 else -1
    content = text[start + len(BOX) : end] if end >= 0 else None
    blank = is_blank(text if content is None else content)
    answer = None if blank or content is None else content.strip()
    return Extraction(
        answer=answer,
        strict_format=answer is not None,
        lenient_answer=answer if start >= 0 else last_number(text),
        empty_answer=blank,
        reasoning=text[:start] if answer is not None else None,
        # The box may stand inside a formula: $\boxed{42}$.
        trailing_chars=len(text[end + 1 :].strip().strip("$.").strip()) if answer is not None else 0,
    )


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one before `start`; -1 when none does."""
    depth, index = 1, start
    while index < len(text):
        letter = text[index]
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return index
        index += 2 if letter == "\\" else 1
    return -1


def read_json(text: str, completion: CompletionConfig) -> Extraction:
    """Read one completion by the rules of this module, in time linear in its length.

    Strict: the trimmed completion is an object, or has exactly one fenced block, which holds one, with nothing after the fence.
    The object names no key twice, has every key of `required` and fits `json_schema`. The answer is the value of `answer_key`:
    text as it stands, anything else as compact JSON; null is none. Lenient: the same key from the first { to the last }, or in
    the last fenced block. NaN, Infinity, numbers of thousands of digits, and text beyond MAX_JSON_CHARS or MAX_DEPTH are no JSON.
    """
    before, strict_text = _strict_text(text)
    found = parse_object(strict_text) if strict_text is not None else None
    answer = answer_text(found, completion.answer_key)
    lenient = answer if found is not None else answer_text(_lenient_object(text), completion.answer_key)
    empty = is_blank(text) or found == {} or (found is not None and completion.answer_key is not None and answer is None)
    return Extraction(
        answer=answer,
        strict_format=not empty and found is not None and keeps_rules(found, completion),
        lenient_answer=lenient,
        empty_answer=empty,
        reasoning=before if found is not None and before.strip() else None,
    )


def keeps_rules(found: JsonObject, completion: CompletionConfig) -> bool:
    """Whether an object has the required keys and fits the schema."""
    schema = completion.json_schema
    return all(key in found for key in completion.required) and (schema is None or fits_schema(found, _as_text(schema)))


def parse_object(text: str) -> JsonObject | None:
    """The object that the whole text is; None for any other text. Never raises."""
    text = text.strip()
    if len(text) > MAX_JSON_CHARS or not text.startswith("{") or _depth(text) > MAX_DEPTH:
        return None
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def answer_text(found: JsonObject | None, key: str | None) -> str | None:
    """The value of a key as text; None where there is none, or a blank one."""
    value = found.get(key) if found is not None and key is not None else None
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return None if is_blank(text) else text.strip()


def _strict_text(text: str) -> tuple[str, str | None]:
    """The text before the object, and the text that has to be the object; None where the completion has no such text."""
    trimmed = text.strip()
    if trimmed.startswith("{"):
        return "", trimmed
    if trimmed.count(FENCE) != 2 or not trimmed.endswith(FENCE):
        return "", None
    before, _, block = trimmed.removesuffix(FENCE).partition(FENCE)
    return before, block.removeprefix("json")


def _lenient_object(text: str) -> JsonObject | None:
    first, last = text.find("{"), text.rfind("}")
    found = parse_object(text[first : last + 1]) if 0 <= first < last else None
    if found is not None:
        return found
    closed = text.rfind(FENCE)
    opened = text.rfind(FENCE, 0, max(closed, 0))
    return parse_object(text[opened + len(FENCE) : closed].removeprefix("json")) if 0 <= opened < closed else None


def _depth(text: str) -> int:
    """The deepest nesting of brackets, those inside strings included: an upper bound without a parser."""
    depth = deepest = 0
    for letter in text:
        if letter in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "}]":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        # {"answer": 1, "answer": 2} lists answers.
        raise ValueError("a key occurs twice")
    return found


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("the number is too large")
    return number


def _as_text(schema: JsonObject) -> str:
    return json.dumps(schema, sort_keys=True)


def read_pattern(text: str, pattern: str) -> Extraction:
    """Read one completion by the rules of this module.

    The format is kept when the pattern matches and the group is not blank. Only the last match counts. The engine is RE2 (in
    pyarrow): one match is linear in the text, listing all may take its square, so only the last SEARCHED_CHARS characters are
    searched.
    """
    searched = text[-SEARCHED_CHARS:].replace(_OPENED, "").replace(_CLOSED, "").encode(errors="replace").decode()
    before, opened, rest = _marked(searched, pattern).rpartition(_OPENED)
    content, _, after = rest.partition(_CLOSED)
    blank = is_blank(content if opened else text)
    answer = None if blank or not opened else content.strip()
    return Extraction(
        answer=answer,
        strict_format=answer is not None,
        lenient_answer=answer if opened else last_number(text),
        empty_answer=blank,
        reasoning=before.replace(_OPENED, "").replace(_CLOSED, "") if answer is not None else None,
        trailing_chars=len(after.strip()) if answer is not None else 0,
    )


def check_pattern(pattern: str) -> None:
    """Raise `ConfigError` unless the pattern is a linear-time regular expression with a group."""
    try:
        _marked("", pattern)
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0].removeprefix("Invalid regular expression: ")
        if "replacement" in reason:
            reason = "it has no group that captures the answer"
        raise ConfigError(
            f"the pattern cannot be used: {reason}",
            place=f"completion.pattern: {pattern}",
            fix="for example '#### (.+)'; RE2 syntax: no look-around, no back-references",
        ) from error


def _marked(text: str, pattern: str) -> str:
    """The text with each match replaced by its first group between marks."""
    marked = pc.replace_substring_regex(pa.array([text]), pattern=pattern, replacement=f"{_OPENED}\\1{_CLOSED}")
    return str(marked[0].as_py())
