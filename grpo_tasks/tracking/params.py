"""A configuration as MLflow parameters: every field, none dropped, none cut.

    stages: [{learning_rate: 1e-3, rewards: [a, b]}]   ->   stages.0.learning_rate = 0.001, stages.0.rewards = ["a", "b"]

Values are written as in JSON, strings bare; a list of plain values is one parameter. MLflow takes 6,000 characters: a longer text
is split over `KEY.part1`, `KEY.part2` ..., and `KEY` holds its length and SHA-256. Only user-chosen keys (params of a
reward) can hold characters that MLflow refuses; they are written as _x3F_. Knows no mlflow.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

MAX_VALUE = 6_000
MAX_KEY = 250


def flatten(section: BaseModel) -> dict[str, str]:
    """All fields of a part of the configuration, nested ones by dotted keys."""
    params: dict[str, str] = {}
    for key, value in _leaves(section.model_dump(mode="json"), ""):
        params |= _fit(_clean(key), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return params


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    children: Mapping[str, Any] | None = None
    if isinstance(node, dict) and node:
        children = node
    elif isinstance(node, list) and any(isinstance(item, dict | list) for item in node):
        children = {str(index): item for index, item in enumerate(node)}
    if children is None:
        yield prefix, node
        return
    for key, value in children.items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


def _clean(key: str) -> str:
    clean = re.sub(r"[^\w.\- ]", lambda found: f"_x{ord(found[0]):X}_", key, flags=re.ASCII)
    if len(clean) <= MAX_KEY - len(".part999"):
        return clean
    return f"{clean[:200]}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _fit(key: str, text: str) -> dict[str, str]:
    if len(text) <= MAX_VALUE:
        return {key: text}
    parts = [text[start : start + MAX_VALUE] for start in range(0, len(text), MAX_VALUE)]
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    head = {key: f"{len(text)} characters in {len(parts)} parts, sha256 {digest}"}
    return head | {f"{key}.part{number}": part for number, part in enumerate(parts, start=1)}
