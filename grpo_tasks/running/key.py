"""Content keys: a hash of a step's inputs and of the code that it reaches.

Prefect's TASK_SOURCE policy hashes only the lines of the task itself. The logic is in the rooms, so an edited room would give
back the old result. Here every module counts that the step's file imports, or names in a string because it is started in a
process of its own, and every module that these reach; without comments and docstrings.

Data files, tables of rows, model folders, the user's own reward modules and outputs of earlier steps count by their content,
everything else in the inputs by its JSON. It does not count where a file lies, when or how fast a step ran, machine settings
(they are no inputs), or MACHINERY.
"""

import ast
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tenacity
from pydantic import BaseModel

from grpo_tasks.content.hashes import file_sha256, folder_sha256, outputs_sha256
from grpo_tasks.content.model_files import hub_commit
from grpo_tasks.content.modules import modules_sha256
from grpo_tasks.content.shards import shards_sha256
from schemas.config.data import DataSource
from schemas.config.model import ModelConfig
from schemas.config.rewards import JUDGES_BY, JudgeConfig, RewardsConfig
from schemas.config.rollout import InteractionConfig
from schemas.config.run import RunConfig
from schemas.config.stage import DemonstrationsConfig
from schemas.errors import DamagedError
from schemas.paths import resolve
from schemas.results.base import StepResult
from schemas.results.data import PromptTable
from schemas.results.model import ModelRef

_ROOT = Path(__file__).resolve().parents[2]
MACHINERY = tuple(f"grpo_tasks.{room}" for room in ("cluster", "kit", "operating", "processes", "running"))
"""How and where a step is run. It does not change what the step makes."""
_OURS = re.compile(r"(grpo_tasks|schemas)(\.\w+)+")


def content_key(step: str, roots: Iterable[str], inputs: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over the name of the step, the code that its modules reach, and its inputs."""
    parts = [step, code_sha256(*sorted(roots))]
    parts += [
        f"{name}={json.dumps(_json_value(value), sort_keys=True, ensure_ascii=False)}" for name, value in sorted(inputs.items())
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def code_sha256(*roots: str) -> str:
    """SHA-256 (hex) over the code of modules and of all that they reach."""
    digest = hashlib.sha256()
    for module in code_behind(*roots):
        digest.update(f"{module}\0{_source(module).code}\0".encode())
    return digest.hexdigest()


@cache
def code_behind(*roots: str) -> list[str]:
    """Names of modules and of all that they reach, sorted."""
    found, left = set(roots), [*roots]
    while left:
        reached = {name for name in _source(left.pop()).names if not name.startswith(MACHINERY)} - found
        found |= reached
        left += reached
    return sorted(found)


@dataclass(frozen=True, slots=True)
class _Source:
    code: str
    names: frozenset[str]
    """The modules of ours that it imports, or names in a string."""


@cache
def _source(module: str) -> _Source:
    path = _file(module) or Path(inspect.getfile(sys.modules[module]))  # a step of the user's, or of a test
    tree, names = _parse(path.read_text(encoding="utf-8")), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _OURS.fullmatch(node.value):
            names |= {node.value, f"{node.value}.__main__"}
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    templates = [page.read_text(encoding="utf-8") for page in sorted(path.parent.glob("templates/*.html"))]
    return _Source("\0".join([ast.unparse(tree), *templates]), frozenset(filter(_file, names)))


def _file(module: str) -> Path | None:
    """The file of a module of ours; None for any other name."""
    path = _ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py") if module.startswith(("grpo_tasks", "schemas", "flows")) else ()
    return next((file for file in files if file.is_file()), None)


@tenacity.retry(
    # Python 3.11 counts the recursion depth of all threads together, so a compilation in another thread can fail this one.
    retry=tenacity.retry_if_exception_type(SystemError),
    stop=tenacity.stop_after_attempt(20),
    wait=tenacity.wait_fixed(0.05),
    reraise=True,
)
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _json_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _model_json(value)
    if isinstance(value, Mapping):
        return {str(name): _json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _json_value(asdict(value))
    return str(value) if isinstance(value, Path) else value


def _model_json(value: BaseModel) -> Any:
    if isinstance(value, StepResult):
        # The key alone is not enough: a step that runs again may write other bytes under the same key (on a GPU it does).
        return [value.key, outputs_sha256(value.manifest, value.OUTPUTS)]
    if isinstance(value, PromptTable):
        return file_sha256(value.path)
    if isinstance(value, ModelRef):
        return model_contents(value)
    # A section of a step's config has only the fields that the step reads.
    fields = {name: _json_value(getattr(value, name)) for name in type(value).model_fields if name in value.__dict__}
    # The folder in which a module was found does not matter, only its code (see _contents).
    fields.pop("module_dir", None)
    if isinstance(value, JudgeConfig):
        # Address, limits and cache do not change verdicts, so a stopped stage resumes under the same key.
        fields = {name: given for name, given in fields.items() if name in JUDGES_BY.split()}
    if isinstance(value, InteractionConfig):
        # Which worker serves a conversation does not change it.
        fields.pop("workers")
    return fields | {"contents": _contents(value)}


def _contents(value: BaseModel) -> str:
    """Digest of what a config section refers to by name: a data file, a model folder or hub commit, the code of rewards."""
    if isinstance(value, DataSource):
        # Where the run has locked the hashes, reading the files compares the rows with them.
        return shards_sha256(value)
    if isinstance(value, ModelConfig):
        path = Path(resolve(value.path))
        if path.exists():
            # A base model is read once, not once per step.
            found = path_sha256(path, remembered=True)
            if value.sha256 not in (None, found):
                raise DamagedError(
                    "the base model has changed since this run started",
                    place=value.path,
                    fix="start the run again when its files are complete; steps whose inputs are the same are skipped",
                )
            return found
        # A version of the registry is named by its number; the hub knows nothing of it.
        return "" if value.path.startswith("models:/") else hub_commit(value.path, value.revision)
    if isinstance(value, JudgeConfig):
        # What people have judged.
        return file_sha256(value.gold) if value.gold is not None and value.gold.is_file() else ""
    return _own_code(value)


def _own_code(value: BaseModel) -> str:
    """Digest of the user's modules that a section names: each as this section finds it."""
    if isinstance(value, RewardsConfig):
        return _code_of([reward.function for _, reward in sorted(value.functions.items())], value.module_dirs())
    if isinstance(value, RunConfig):
        return _code_of([value.lab.gold], value.rewards.module_dirs()) if "lab" in value.__dict__ else ""
    if isinstance(value, InteractionConfig):
        return _code_of(value.own_code, value.module_dirs())
    return _code_of([value.function], value.module_dirs()) if isinstance(value, DemonstrationsConfig) else ""


def _code_of(references: Iterable[str | None], folders: Sequence[Path]) -> str:
    modules = [module for module, colon, _ in ((reference or "").partition(":") for reference in references) if colon]
    # A module of ours that a config names, such as the adapter for environments of verifiers, is reached by no import.
    return " ".join(code_sha256(module) if _file(module) else modules_sha256(module, folders) for module in modules)


def model_contents(ref: ModelRef) -> dict[str, str]:
    """Digests of a model's base and adapter; raises `DamagedError` when they are not what the reference was made for."""
    base = Path(resolve(ref.path))
    # A model that a step wrote is compared with what it wrote.
    digests = {
        "base": path_sha256(base, remembered=ref.sha256 is None or ref.adapter is not None)
        if base.exists()
        else hub_commit(ref.path, ref.revision)
    }
    if not base.exists():
        digests |= {"hub": f"{ref.path}@{ref.revision}"}
    if ref.adapter is not None:
        digests["adapter"] = path_sha256(ref.adapter)
    if ref.sha256 is not None and ref.sha256 != digests.get("adapter", digests["base"]):
        raise DamagedError(
            "the model is not what its step wrote (its SHA-256 differs)",
            place=str(ref.adapter or base),
            fix="run the same command again: the step that made it runs again",
        )
    return digests


def path_sha256(path: Path, *, remembered: bool = False) -> str:
    """SHA-256 (hex) of a file, or of all files of a folder together; `remembered` as for `file_sha256`."""
    return (file_sha256 if path.is_file() else folder_sha256)(path, remembered=remembered)
