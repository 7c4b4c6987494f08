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
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from grpo_tasks.answers.extraction import Extraction, is_blank, last_number
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

_PLACE = "completion.json_schema"


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


def fits_schema(found: Mapping[str, Any], schema: str) -> bool:
    """Whether an object fits a schema, which is given as JSON text; `check_schema` has accepted it.

    JSON Schema (draft 2020-12) without what a hostile object or a distant document could abuse: patterns are matched by RE2 and
    `uniqueItems` compared as JSON text, both in linear time; references stay inside the schema, so nothing is ever fetched.
    """
    from referencing.exceptions import Unresolvable

    try:
        return bool(_validator(schema).is_valid(found))
    # Of a reference that only some objects reach, of a schema that recurses without end, of a number beyond a float.
    except (Unresolvable, RecursionError, ArithmeticError):
        return False


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless this is a valid schema of an object that refers to nothing outside itself."""
    # Imported here: only a config with a schema needs it.
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

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
        for pattern in _patterns(keyword, value):
            _check_pattern(pattern)


def _patterns(keyword: str, value: Any) -> list[str]:
    if keyword == "pattern" and isinstance(value, str):
        return [value]
    return list(value) if keyword == "patternProperties" and isinstance(value, Mapping) else []


def _check_pattern(pattern: str) -> None:
    try:
        _matches(pattern, "")
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"the pattern {pattern} cannot be used: {str(error).splitlines()[0]}",
            place=_PLACE,
            fix="RE2 syntax: no look-around, no back-references",
        ) from error


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, Mapping):
        for keyword, value in schema.items():
            yield keyword, value
            yield from _keywords(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _keywords(value)


@lru_cache(maxsize=16)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry

    checks = {"pattern": _pattern, "patternProperties": _pattern_properties, "uniqueItems": _unique_items}
    # An empty registry fetches nothing.
    return extend(Draft202012Validator, checks)(json.loads(schema), registry=Registry())


def _pattern(validator: Any, pattern: str, value: Any, _: Any) -> Iterator[Exception]:
    if validator.is_type(value, "string") and not _matches(pattern, value):
        yield _failure(f"{pattern} does not match")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], value: Any, _: Any) -> Iterator[Exception]:
    if validator.is_type(value, "object"):
        for pattern, schema in patterns.items():
            for key in value:
                if _matches(pattern, key):
                    yield from validator.descend(value[key], schema, path=key, schema_path=pattern)


def _unique_items(validator: Any, wanted: bool, value: Any, _: Any) -> Iterator[Exception]:
    if wanted and validator.is_type(value, "array"):
        # 1 and 1.0 are equal numbers in JSON Schema.
        texts = [json.dumps(_whole(item), sort_keys=True) for item in value]
        if len(set(texts)) < len(texts):
            yield _failure("items are repeated")


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _failure(message: str) -> Exception:
    from jsonschema import ValidationError

    return ValidationError(message)


def _matches(pattern: str, text: str) -> bool:
    return bool(pc.match_substring_regex(pa.array([text.encode(errors="replace").decode()]), pattern=pattern)[0].as_py())
