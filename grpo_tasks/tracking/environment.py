"""What a run ran on: git commit, package versions, Python, platform. Knows no mlflow."""

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

_CODE = ("flows", "grpo_tasks", "schemas", "deploy")
_MAIN = ("torch", "transformers", "peft", "accelerate", "mlflow", "prefect", "polars", "grpo-pipeline")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the code came from and what it ran with."""

    git_commit: str
    """Hash of the commit the code was taken from; empty outside a git checkout."""
    git_dirty: bool
    """Whether the code differs from that commit (files not yet added included)."""
    python: str
    platform: str
    packages: dict[str, str]
    """Version of every installed distribution."""

    def tags(self) -> dict[str, str]:
        """The main facts as MLflow tags; `to_json` has all of them."""
        versions = {f"version.{name}": self.packages[name] for name in _MAIN if name in self.packages}
        git = {"mlflow.source.git.commit": self.git_commit} if self.git_commit else {}
        return (
            git
            | versions
            | {
                "git.commit": self.git_commit or "none",
                "git.dirty": str(self.git_dirty).lower(),
                "python": self.python,
                "platform": self.platform,
            }
        )

    def to_json(self) -> str:
        """Everything, for the artifact environment.json."""
        return json.dumps(asdict(self), indent=2)


def describe_environment() -> Environment:
    """Look at the checkout and the installed distributions."""
    packages = {found.name.lower(): found.version for found in metadata.distributions() if found.name}
    return Environment(
        git_commit=_git("rev-parse", "HEAD"),
        git_dirty=bool(_git("status", "--porcelain", "--", *_CODE)),
        python=platform.python_version(),
        platform=platform.platform(),
        packages=dict(sorted(packages.items())),
    )


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        # No git, or code that was installed rather than checked out: both are fine, and said as "none".
        return ""
    return done.stdout.strip()
