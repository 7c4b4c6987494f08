"""Content keys: a hash of a step's inputs and of the code it reaches.

Prefect's own TASK_SOURCE policy hashes only the lines of the task; with the logic in the rooms, an edited library would give back
the old result. Here the rooms count too, without their comments and docstrings.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tenacity
from pydantic import BaseModel

from grpo_tasks.content.hashes import file_sha256, folder_sha256
from grpo_tasks.content.hub import hub_commit
from grpo_tasks.content.manifest import outputs_sha256
from grpo_tasks.content.modules import modules_sha256
from schemas.config.data import DataSource
from schemas.config.model import ModelConfig
from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.errors import DamagedError
from schemas.paths import resolve
from schemas.results import ModelRef, StepResult

_ROOT = Path(__file__).resolve().parent.parent


def content_key(step: str, rooms: Iterable[str], inputs: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the step's name, the source of its rooms and of schemas/, and its inputs.

    Results of earlier steps count by their keys and the contents of their outputs, models, data files and the user's own modules
    by their contents, everything else by its JSON.

    Raises:
        DamagedError: a model is not what the step that made it has written.
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
    if isinstance(value, BaseModel):
        return _record(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    return str(value) if isinstance(value, Path) else value


def _record(value: BaseModel) -> Any:
    if isinstance(value, StepResult):
        # Made again, a step may leave other bytes under the same key (on a GPU it does): they count too.
        return [value.key, outputs_sha256(value.manifest, value.OUTPUTS)]
    if isinstance(value, ModelRef):
        return model_contents(value)
    fields = {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    # Where a module was found says nothing about what it does.
    fields.pop("module_dir", None)
    return fields | {"contents": _contents(value)}


def _contents(value: BaseModel) -> str:
    """What a config only names: data files, model folders and the user's own reward functions count by content."""
    if isinstance(value, DataSource | ModelConfig):
        path = Path(resolve(value.path))
        if path.exists():
            return path_sha256(path)
        return hub_commit(value.path, value.revision) if isinstance(value, ModelConfig) else ""
    if isinstance(value, RewardConfig):
        return _code(value, None)
    if isinstance(value, RewardsConfig):
        return " ".join(_code(reward, value.module_dirs()) for _, reward in sorted(value.functions.items()))
    return ""


def _code(reward: RewardConfig, folders: Sequence[Path] | None) -> str:
    module, colon, _ = (reward.function or "").partition(":")
    return modules_sha256(module, folders) if colon else ""


def model_contents(ref: ModelRef) -> dict[str, str]:
    """What a model is made of: the contents of its base and of its adapter, wherever they lie.

    Raises:
        DamagedError: the files are not those that the reference was made for.
    """
    base = Path(resolve(ref.path))
    made_of = {"base": path_sha256(base) if base.exists() else hub_commit(ref.path, ref.revision)}
    if not base.exists():
        made_of |= {"hub": f"{ref.path}@{ref.revision}"}
    if ref.adapter is not None:
        made_of["adapter"] = path_sha256(ref.adapter)
    if ref.sha256 is not None and ref.sha256 != made_of.get("adapter", made_of["base"]):
        raise DamagedError(
            "the model is not what its step wrote (its SHA-256 differs)",
            place=str(ref.adapter or base),
            fix="run the same command again: the step that made it runs again",
        )
    return made_of


def path_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file, or over all files of a folder."""
    return file_sha256(path) if path.is_file() else folder_sha256(path)
