"""A completion that keeps the format and gives an answer: what the lab probes rewards with. The inverse of extract.py.

Each attempt is read back. A pattern or a schema that these simple means cannot satisfy gives no completion, never a wrong one.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_tasks.answers.extract import extract
from grpo_tasks.answers.inverse_pattern import text_matching
from grpo_tasks.answers.tags import Tags
from schemas.config.completion import CompletionConfig

_MAX_DEPTH = 8
_FILLER = "text"


def perfect_completion(
    answer: str | None, completion: CompletionConfig, *, reasoning: str = "Working it out step by step."
) -> str | None:
    """A completion from which `extract` reads this answer in the strict format; None when none can be made.

    Args:
        answer: the answer; None for a row without ground truth. Only a JSON object can do without one.
        completion: the format.
        reasoning: text for the place where the format has reasoning. It must not contain the format's own marks.
    """
    answer = None if answer is None else answer.strip()
    for text in _attempts(answer, completion, reasoning):
        found = extract(text, completion)
        if found.strict_format and (found.answer == answer or (answer is None and completion.answer_key is None)):
            return text
    return None


def _attempts(answer: str | None, completion: CompletionConfig, reasoning: str) -> Iterator[str]:
    if completion.format == "json":
        yield from _objects(answer, completion)
    if answer is None:
        return
    if completion.format == "tags":
        yield Tags.of(completion.tags).block(reasoning, answer)
    elif completion.format == "boxed":
        yield f"{reasoning} \\boxed{{{answer}}}"
    elif completion.format == "regex":
        made = text_matching(completion.pattern or "", answer)
        if made is not None:
            yield from (f"{reasoning}\n{made}", made)


def _objects(answer: str | None, completion: CompletionConfig) -> Iterator[str]:
    schema = completion.json_schema or {}
    made = _instance(schema, schema)
    found = made if isinstance(made, dict) else {}
    found = found | {key: _FILLER for key in completion.required if key not in found}
    for value in _values(answer):
        yield json.dumps(found | ({completion.answer_key: value} if completion.answer_key else {}), ensure_ascii=False)


def _values(answer: str | None) -> Iterator[Any]:
    """The answer as a JSON value: as text, and as the number, boolean or list that the text spells."""
    yield answer
    try:
        yield json.loads(answer or "null")
    except (ValueError, RecursionError):
        return


def _instance(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """A small value that probably fits a schema."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _FILLER
    if "$ref" in schema:
        return _instance(_resolved(schema["$ref"], root), root, depth + 1)
    for keyword, given in (
        ("const", schema.get("const")),
        *((name, (schema.get(name) or [None])[0]) for name in ("enum", "examples")),
    ):
        if keyword in schema:
            return given
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword):
            return _instance(schema[keyword][0], root, depth + 1)
    return _of_type(schema, root, depth)


def _of_type(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema or "required" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        known = schema.get("properties", {})
        return {key: _instance(known.get(key, {}), root, depth + 1) for key in schema.get("required", ())}
    if kind == "array":
        return [_instance(schema.get("items", {}), root, depth + 1) for _ in range(min(schema.get("minItems", 0), 100))]
    if kind in ("number", "integer"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0 if schema.get("maximum", 1) > 0 else schema["maximum"]))
        return low + ("exclusiveMinimum" in schema)
    filler = _FILLER * (1 + min(schema.get("minLength", 0), 10_000) // len(_FILLER))
    return {"boolean": True, "null": None}.get(kind, filler[: schema.get("maxLength", len(filler))])


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
    return found
