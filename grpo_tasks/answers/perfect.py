"""A completion that keeps the format and gives an answer: what the lab probes rewards with. The inverse of extract.py.

Each attempt is read back. A pattern or a schema that these simple means cannot satisfy gives no completion, never a wrong one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_tasks.answers.extract import extract
from grpo_tasks.answers.tags import Tags
from schemas.config.completion import CompletionConfig

_MAX_DEPTH = 8
_FILLER = "text"

_ESCAPES = {"s": " ", "d": "1", "w": "a", "n": "\n", "t": "\t", "S": "x", "D": "x", "W": " "}
_NOTHING = frozenset("bBAzZ")
"""Escapes that match at a place and take no text."""


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


def text_matching(pattern: str, answer: str) -> str | None:
    """A text that probably matches, with the answer in the place of the first group; None for a pattern beyond these means.

    Literals, classes, groups, alternatives and repetitions are inverted in the simplest way: the first alternative, the fewest
    repetitions. The caller checks whether the pattern really matches.
    """
    try:
        reader = _Reader(pattern, answer)
        text = reader.alternatives()
    except (IndexError, ValueError):
        return None
    return text if reader.used and reader.index == len(pattern) else None


@dataclass(slots=True)
class _Reader:
    pattern: str
    answer: str
    index: int = 0
    used: bool = False
    """Whether the first group was met; groups after it are read for their text."""

    def alternatives(self) -> str:
        """The text of the alternatives up to the closing bracket or the end: that of the first one."""
        text = self._sequence()
        while self._peek() == "|":
            self.index += 1
            self._sequence()
        return text

    def _sequence(self) -> str:
        pieces = []
        while self._peek() not in ("", "|", ")"):
            start = self.used
            piece = self._atom()
            least = self._least()
            # The group of the answer stays even where it may be left out.
            pieces.append(piece * (max(least, 1) if self.used and not start else least))
        return "".join(pieces)

    def _peek(self) -> str:
        return self.pattern[self.index : self.index + 1]

    def _take(self) -> str:
        letter = self.pattern[self.index]
        self.index += 1
        return letter

    def _atom(self) -> str:
        letter = self._take()
        if letter == "(":
            return self._group()
        if letter == "[":
            return self._one_of()
        if letter == "\\":
            escaped = self._take()
            return "" if escaped in _NOTHING else _ESCAPES.get(escaped, escaped)
        return {"^": "", "$": "", ".": "x"}.get(letter, letter)

    def _group(self) -> str:
        if self._peek() == "?" and self.pattern[self.index + 1] not in "P<":
            # (?i) sets flags; (?i:...) and (?:...) group without capturing.
            while self._take() not in ":)":
                pass
            if self.pattern[self.index - 1] == ")":
                return ""
            captures = False
        else:
            if self._peek() == "?":
                self.index = self.pattern.index(">", self.index) + 1
            captures = not self.used
            self.used = True
        text = self.alternatives()
        if self._take() != ")":
            raise ValueError("an open group")
        return self.answer if captures else text

    def _one_of(self) -> str:
        if self._peek() == "^":
            end = self.pattern.index("]", self.index + 2)
            excluded, self.index = self.pattern[self.index : end], end + 1
            return next(letter for letter in "x1 -" if letter not in excluded)
        letter = self._take()
        escaped = self._take() if letter == "\\" else ""
        self.index = self.pattern.index("]", self.index) + 1
        return _ESCAPES.get(escaped, escaped) if escaped else letter

    def _least(self) -> int:
        mark = self._peek()
        if mark not in ("*", "+", "?", "{") or not mark:
            return 1
        self.index += 1
        least = {"*": 0, "?": 0, "+": 1}.get(mark, 1)
        if mark == "{":
            end = self.pattern.index("}", self.index)
            least = min(int(self.pattern[self.index : end].split(",")[0]), 1_000)
            self.index = end + 1
        if self._peek() == "?":
            self.index += 1
        return least
