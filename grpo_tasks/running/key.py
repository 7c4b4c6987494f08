"""Content keys: a hash of a step's inputs and of the code it reaches.

Prefect's own TASK_SOURCE policy hashes only the lines of the task; with the logic in the rooms, an edited library would give back
the old result. Here the rooms count too, without their comments and docstrings.
"""

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tenacity
from pydantic import BaseModel

from schemas.config import DataSource, ModelConfig, RewardConfig
from schemas.paths import resolve
from schemas.results import ModelRef, StepResult

_ROOT = Path(__file__).resolve().parent.parent
_LARGE_BYTES = 64 * 2**20


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
    files = sorted([*folder.rglob("*.py"), *folder.rglob("*.html")]) if folder.is_dir() else [folder.with_suffix(".py")]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(_ROOT.parent).as_posix().encode() + b"\0")
        digest.update(_code_of(path).encode() + b"\0")
    return digest.hexdigest()


def _code_of(path: Path) -> str:
    if path.suffix != ".py":
        return path.read_text(encoding="utf-8")
    tree = _parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@tenacity.retry(
    # Python 3.11 counts the depths of all threads together and takes another thread's compilation for its own fault.
    retry=tenacity.retry_if_exception_type(SystemError),
    stop=tenacity.stop_after_attempt(20),
    wait=tenacity.wait_fixed(0.05),
    reraise=True,
)
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _canonical(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, StepResult):
        return value.key
    if isinstance(value, BaseModel):
        fields = {name: _plain(getattr(value, name)) for name in type(value).model_fields}
        return fields | {"contents": _contents(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    return str(value) if isinstance(value, Path) else value


def _contents(value: BaseModel) -> str:
    """What a config only names: data files, model folders and the user's own reward functions count by content."""
    if isinstance(value, DataSource | ModelConfig | ModelRef):
        path = Path(resolve(value.path))
        return files_digest(path) if path.exists() else ""
    if isinstance(value, RewardConfig) and value.function and ":" in value.function:
        return module_digest(value.function.partition(":")[0])
    return ""


@cache
def files_digest(path: Path) -> str:
    """SHA-256 over a file, or over all files of a folder; large weights count by size and time of change."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file()):
        status = file.stat()
        large = path.is_dir() and status.st_size > _LARGE_BYTES
        content = f"{status.st_size}/{status.st_mtime_ns}" if large else _file_digest(file)
        digest.update(f"{file.relative_to(path)}\0{content}\0".encode())
    return digest.hexdigest()


def module_digest(module: str) -> str:
    """SHA-256 of the file of a module that is importable from the working directory; empty when there is none."""
    relative = Path(*module.split("."))
    for candidate in (Path.cwd() / relative.with_suffix(".py"), Path.cwd() / relative / "__init__.py"):
        if candidate.exists():
            return _file_digest(candidate)
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    return _file_digest(Path(found.origin)) if found and found.origin and Path(found.origin).is_file() else ""


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
