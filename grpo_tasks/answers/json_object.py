"""Format `json`: the completion is a JSON object, or free text that ends in one fenced JSON object.

Strict: the trimmed completion is an object, or it has exactly one fenced block (```json ... ``` or ``` ... ```), which holds one,
with nothing after the fence. The object names no key twice, has every key of `required` and fits `json_schema`.

Answer. The value of `answer_key` in that object, whatever the other keys are: text as it stands, a number or a boolean as JSON
writes it, a list or an object as compact JSON. A null is no answer. Without `answer_key` there is none.

Lenient answer. The same key in the text from the first { to the last }, or in the last fenced block.

JSON beyond MAX_JSON_CHARS or MAX_DEPTH is no object. NaN, Infinity and numbers of more than a few thousand digits are no JSON.
"""

import json
from typing import Any

from grpo_tasks.answers.extraction import Extraction, is_blank
from grpo_tasks.answers.json_rules import fits_schema
from schemas.config.completion import CompletionConfig

MAX_JSON_CHARS = 100_000
"""A longer text is no JSON object. It bounds the time and memory of the parser and of the schema's checks."""
MAX_DEPTH = 32
"""Deepest nesting of an object."""
FENCE = "```"

JsonObject = dict[str, Any]


def read_json(text: str, completion: CompletionConfig) -> Extraction:
    """Read one completion by the rules of this module, in time linear in its length."""
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
