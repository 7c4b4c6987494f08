"""JSON Schema (draft 2020-12) through jsonschema, without what a hostile object or a distant document could abuse.

pattern, patternProperties  matched by RE2, in linear time, not by Python's `re`
uniqueItems                 compared as JSON text, in linear time
$ref, $dynamicRef           inside the schema only: nothing is ever fetched
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import ConfigError

_PLACE = "completion.json_schema"


def fits_schema(found: Mapping[str, Any], schema: str) -> bool:
    """Whether an object fits a schema, which is given as JSON text; `check_schema` has accepted it."""
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
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
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
