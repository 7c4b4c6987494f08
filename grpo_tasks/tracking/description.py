"""How a run is described: every field of its configuration as a parameter, its environment as tags and environment.json.

A field has its dotted name, such as stages.0.learning_rate. None is dropped and no value is cut: MLflow takes 6,000 characters,
so a longer text is split over `KEY.part1`, `KEY.part2` ..., and `KEY` holds its length and SHA-256. A `?` in a key that a user
chose becomes `_x3F_`. Imports no mlflow.
"""

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from schemas.config.run import RunConfig

ENVIRONMENT = "environment.json"
MAX_VALUE = 6_000
MAX_KEY = 250
STAGE_SECTIONS = ("model", "data", "validation", "completion", "rollout", "interaction", "difficulty")
"""Sections of the config that shape every stage. `rewards` is not one of them: a stage has only those that it uses."""
_CODE = ("flows", "grpo_tasks", "schemas", "deploy")
MAIN_PACKAGES = ("torch", "transformers", "peft", "accelerate", "mlflow", "prefect", "polars", "grpo-pipeline")
_ROOT = Path(__file__).resolve().parents[2]


def flatten(section: BaseModel) -> dict[str, str]:
    """All fields of a section of the configuration, nested ones under dotted keys."""
    params: dict[str, str] = {}
    for name, value in _leaves(section.model_dump(mode="json"), ""):
        key, text = _clean(name), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        params[key] = text
        if len(text) > MAX_VALUE:
            parts = [text[start : start + MAX_VALUE] for start in range(0, len(text), MAX_VALUE)]
            digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
            params[key] = f"{len(text)} characters in {len(parts)} parts, sha256 {digest}"
            params |= {f"{key}.part{number}": part for number, part in enumerate(parts, start=1)}
    return params


def stage_params(config: RunConfig, stage: str) -> dict[str, str]:
    """Everything that shaped one stage, defaults included: its settings, the sections it reads, and its rewards as resolved."""
    settings = config.stage(stage)
    params = flatten(settings) | {"seed": str(config.seed)}
    for name in STAGE_SECTIONS:
        params |= {f"{name}.{key}": value for key, value in flatten(getattr(config, name)).items()}
    for reward in settings.rewards:
        resolved = config.rewards.resolve(reward)
        if resolved is not None:
            params |= {f"reward.{_clean(reward)}.{key}": value for key, value in flatten(resolved).items()}
    return params | {"rewards.memory_limit_gb": json.dumps(config.rewards.memory_limit_gb)}


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list) and any(isinstance(item, dict | list) for item in node):
        node = dict(enumerate(node))
    if not isinstance(node, dict) or not node:
        yield prefix, node
        return
    for key, value in node.items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


def _clean(key: str) -> str:
    clean = re.sub(r"[^\w.\- ]", lambda found: f"_x{ord(found[0]):X}_", key, flags=re.ASCII)
    # Room for a suffix.
    if len(clean) <= MAX_KEY - len(".part999"):
        return clean
    return f"{clean[:200]}.{hashlib.sha256(key.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Environment:
    """The code, packages and platform of a run."""

    git_commit: str
    """Hash of the checked-out commit; empty outside a git checkout."""
    git_dirty: bool
    """Whether the code differs from that commit; untracked files count."""
    python: str
    platform: str
    packages: dict[str, str]
    """Version of every installed distribution."""

    def tags(self) -> dict[str, str]:
        """The code's version as MLflow tags; `to_json` has everything."""
        git = {"mlflow.source.git.commit": self.git_commit} if self.git_commit else {}
        return git | {"git.commit": self.git_commit or "none", "git.dirty": str(self.git_dirty).lower()}


def describe_environment() -> Environment:
    """Read the state of the checkout and the versions of the installed distributions."""
    packages = {}
    for found in metadata.distributions():
        # From the head of its metadata; `found.name` would parse all of it, twice.
        head = (found.read_text("METADATA") or found.read_text("PKG-INFO") or "").partition("\n\n")[0]
        fields = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in head.splitlines())}
        if name := fields.get("name"):
            packages[name.lower()] = fields.get("version", "")
    return Environment(
        git_commit=_git("rev-parse", "HEAD"),
        git_dirty=bool(_git("status", "--porcelain", "--", *_CODE)),
        python=platform.python_version(),
        platform=platform.platform(),
        packages=dict(sorted(packages.items())),
    )


def _git(*arguments: str) -> str:
    """Output of a git command; empty without git, or when the code was installed instead of checked out."""
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
