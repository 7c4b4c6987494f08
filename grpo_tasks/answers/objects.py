"""Format `json`: the answer is the value of a key of one JSON object, which may have to fit a JSON Schema.

strict    the trimmed completion is an object, or has exactly one fenced block, which holds one, with nothing after the fence. The
          object names no key twice, has every key of `required` and fits `json_schema`
answer    the value of `answer_key`: text as it stands, anything else as compact JSON; null is none. Without a key: with equality
          json the whole object, else none
lenient   the same key from the first { to the last }, or in the last fenced block

NaN, Infinity, numbers of thousands of digits, and text beyond MAX_JSON_CHARS or MAX_DEPTH are no JSON.

Schemas are draft 2020-12 without what a hostile object or a distant document could abuse: patterns are matched by RE2 and
`uniqueItems` compared as JSON text, both in linear time; references stay inside the schema, so nothing is ever fetched.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from grpo_tasks.answers.extraction import Extraction, is_blank, nesting
from schemas.config.completion import CompletionConfig
from schemas.errors import ConfigError

MAX_JSON_CHARS = 100_000
"""A longer text is no JSON object. It bounds the time and memory of the parser and of the schema's checks."""
MAX_DEPTH = 32
"""Deepest nesting of an object."""
FENCE = "```"
JsonObject = dict[str, Any]

_PLACE = "completion.json_schema"
_FILLER = "text"
_FILLED_DEPTH = 8


def read_object(text: str, completion: CompletionConfig) -> Extraction:
    """Read one completion by the rules of this module, in time linear in its length."""
    before, strict = "", text.strip()
    if not strict.startswith("{"):
        before, _, block = strict.removesuffix(FENCE).partition(FENCE)
        strict = block.removeprefix("json") if strict.count(FENCE) == 2 and strict.endswith(FENCE) else ""
    found = _parse(strict)
    answer = _answer(found, completion)
    lenient = answer if found is not None else _answer(_lenient_object(text), completion)
    empty = is_blank(text) or found == {} or (found is not None and completion.answer_key is not None and answer is None)
    keeps_rules = (
        found is not None
        and all(key in found for key in completion.required)
        and (completion.json_schema is None or _fits(found, completion.json_schema))
    )
    return Extraction(
        answer=answer,
        strict_format=not empty and keeps_rules,
        lenient_answer=lenient,
        empty_answer=empty,
        reasoning=before if found is not None and before.strip() else None,
    )


def _lenient_object(text: str) -> JsonObject | None:
    first, last = text.find("{"), text.rfind("}")
    found = _parse(text[first : last + 1]) if 0 <= first < last else None
    if found is not None:
        return found
    closed = text.rfind(FENCE)
    opened = text.rfind(FENCE, 0, max(closed, 0))
    return _parse(text[opened + len(FENCE) : closed].removeprefix("json")) if 0 <= opened < closed else None


def _parse(text: str) -> JsonObject | None:
    """The object that the whole text is; None for any other text. Never raises."""
    text = text.strip()
    if len(text) > MAX_JSON_CHARS or not text.startswith("{") or nesting(text, "{[", "}]") > MAX_DEPTH:
        return None
    try:
        found = json.loads(text, object_pairs_hook=unique_keys, parse_constant=finite_number, parse_float=finite_number)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    """An object of a JSON text; ValueError where a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        # {"answer": 1, "answer": 2} lists answers.
        raise ValueError("a key occurs twice")
    return found


def finite_number(digits: str) -> float:
    """A number of a JSON text; ValueError where it is not finite."""
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits} is no JSON")
    return number


def _answer(found: JsonObject | None, completion: CompletionConfig) -> str | None:
    """The value of the key, or the whole object, as text; None where there is none, or a blank one."""
    if completion.answer_key is None:
        value: Any = found if completion.equality == "json" else None
    else:
        value = (found or {}).get(completion.answer_key)
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return None if is_blank(text) else text.strip()


def _fits(found: JsonObject, schema: JsonObject) -> bool:
    """Whether an object fits a schema, which `check_schema` has accepted."""
    from referencing.exceptions import Unresolvable

    try:
        return bool(_validator(json.dumps(schema, sort_keys=True)).is_valid(found))
    # Of a reference that only some objects reach, of a schema that recurses without end, of a number beyond a float.
    except (Unresolvable, RecursionError, ArithmeticError):
        return False


@lru_cache(maxsize=16)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend
    from referencing import Registry

    def pattern(validator: Any, wanted: str, value: Any, _: Any) -> Iterator[Exception]:
        if validator.is_type(value, "string") and not _matches(wanted, value):
            yield ValidationError(f"{wanted} does not match")

    def pattern_properties(validator: Any, patterns: Mapping[str, Any], value: Any, _: Any) -> Iterator[Exception]:
        for wanted, inner in patterns.items() if validator.is_type(value, "object") else ():
            for key in value:
                if _matches(wanted, key):
                    yield from validator.descend(value[key], inner, path=key, schema_path=wanted)

    def unique_items(validator: Any, wanted: Any, value: Any, _: Any) -> Iterator[Exception]:
        if wanted and validator.is_type(value, "array"):
            # 1 and 1.0 are equal numbers in JSON Schema.
            whole = [int(item) if isinstance(item, float) and item.is_integer() else item for item in value]
            if len({json.dumps(item, sort_keys=True) for item in whole}) < len(whole):
                yield ValidationError("items are repeated")

    checks = {"pattern": pattern, "patternProperties": pattern_properties, "uniqueItems": unique_items}
    # An empty registry fetches nothing.
    return extend(Draft202012Validator, checks)(json.loads(schema), registry=Registry())


def _matches(pattern: str, text: str) -> bool:
    return bool(pc.match_substring_regex(pa.array([text.encode(errors="replace").decode()]), pattern=pattern)[0].as_py())


def check_schema(completion: CompletionConfig) -> None:
    """Raise `ConfigError` unless `json_schema` is a valid schema of an object that refers to nothing outside itself."""
    # Imported here: only a config with a schema needs it.
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    schema = completion.json_schema
    if schema is None:
        return
    fix = "see json-schema.org/understanding-json-schema, or name the keys in completion.required"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        path = ".".join(map(str, error.absolute_path))
        raise ConfigError(f"not a JSON Schema: {error.message[:200]}", place=f"{_PLACE}.{path}".rstrip("."), fix=fix) from error
    if schema.get("type", "object") != "object":
        raise ConfigError(f"the schema describes {schema['type']}, not an object", place=_PLACE, fix="type: object")
    registry: Any = Registry()
    resolver = registry.resolver_with_root(DRAFT202012.create_resource(schema))
    for keyword, value in _keywords(schema):
        if keyword in ("$ref", "$dynamicRef") and isinstance(value, str):
            try:
                resolver.lookup(value)
            except Unresolvable as error:
                message = f"{keyword} {value} points outside the schema or at nothing"
                raise ConfigError(message, place=_PLACE, fix="copy what it points at into $defs") from error
        patterns = [value] if keyword == "pattern" else value if keyword == "patternProperties" else ()
        for pattern in patterns if isinstance(value, str | Mapping) else ():
            try:
                _matches(pattern, "")
            except pa.ArrowInvalid as error:
                message = f"the pattern {pattern} cannot be used: {str(error).splitlines()[0]}"
                raise ConfigError(message, place=_PLACE, fix="RE2 syntax: no look-around, no back-references") from error


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, Mapping):
        for keyword, value in schema.items():
            yield keyword, value
            yield from _keywords(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _keywords(value)


def write_object(answer: str, _: str, completion: CompletionConfig) -> Iterator[str]:
    """Objects with the answer as text, and as the number, boolean or list that the text spells; the object that it spells."""
    if completion.answer_key is None and answer.startswith("{"):
        yield answer
        return
    schema = completion.json_schema or {}
    made = _instance(schema, schema)
    found = made if isinstance(made, dict) else {}
    found = found | {key: _FILLER for key in completion.required if key not in found}
    values: list[Any] = [answer]
    with suppress(ValueError, RecursionError):
        values.append(json.loads(answer))
    for value in values:
        yield json.dumps(found | ({completion.answer_key: value} if completion.answer_key else {}), ensure_ascii=False)


def _instance(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """A small value that probably fits a schema."""
    if not isinstance(schema, Mapping) or depth > _FILLED_DEPTH:
        return _FILLER
    if "$ref" in schema:
        return _instance(_resolved(schema["$ref"], root), root, depth + 1)
    if "const" in schema:
        return schema["const"]
    for keyword in ("enum", "examples"):
        if keyword in schema:
            return (schema[keyword] or [None])[0]
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
