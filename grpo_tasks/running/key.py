"""Content keys: a hash of a step's inputs and of the code it reaches.

Prefect's own TASK_SOURCE policy hashes only the lines of the task; with the logic in the rooms, an edited library would give back
the old result. Here the rooms count too, without their comments and docstrings.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from schemas.results import StepResult

_ROOT = Path(__file__).resolve().parent.parent


def content_key(step: str, rooms: Iterable[str], inputs: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the step's name, the source of its rooms and of schemas/, and its inputs.

    Results of earlier steps count by their own keys, everything else by its JSON.
    """
    parts = [step, *(f"{room}={source_digest(room)}" for room in sorted({*rooms, "schemas"}))]
    parts += [f"{name}={_canonical(value)}" for name, value in sorted(inputs.items())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def source_digest(room: str) -> str:
    """SHA-256 over the code of a room (`schemas`, or a folder or file of grpo_tasks)."""
    folder = _ROOT.parent / room if room == "schemas" else _ROOT / room
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(_ROOT.parent).as_posix().encode() + b"\0")
        digest.update(_code_of(path).encode() + b"\0")
    return digest.hexdigest()


def _code_of(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, StepResult):
        return value.key
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value
