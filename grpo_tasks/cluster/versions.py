"""What a machine runs: Python, torch, Ray and our code. Nodes that differ would train something else, or fail in the middle."""

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo_tasks.content.hashes import digest_of, file_sha256
from schemas.errors import ClusterError

_TOP = Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "ray")
"""Packages that decide what is computed, and how nodes speak to each other."""


@dataclass(frozen=True, slots=True)
class Versions:
    """What decides whether two machines compute the same."""

    python: str
    libraries: dict[str, str]
    """Installed version of each of `LIBRARIES`; empty where it is missing."""
    code: str
    """SHA-256 (hex) over our own source files."""

    def differences(self, other: "Versions") -> list[str]:
        """What another machine has instead, in words; nothing where both agree."""
        pairs = [("Python", self.python, other.python)]
        pairs += [(name, ours, other.libraries.get(name, "")) for name, ours in self.libraries.items()]
        pairs += [("our code", self.code[:12], other.code[:12])]
        return [f"{name} {theirs or 'missing'} instead of {ours or 'none'}" for name, ours, theirs in pairs if ours != theirs]


def own_versions() -> Versions:
    """Those of this machine."""
    libraries = {}
    for name in LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            libraries[name] = ""
    return Versions(platform.python_version(), libraries, code_sha256(_TOP))


@cache
def code_sha256(top: Path) -> str:
    """SHA-256 (hex) over the Python files of `grpo_tasks` and `schemas` below a folder."""
    files = [path for package in ("grpo_tasks", "schemas") for path in (top / package).rglob("*.py")]
    return digest_of((path.relative_to(top).as_posix(), file_sha256(path)) for path in files)


def require_equal(versions: Iterable[tuple[str, Versions]]) -> None:
    """Refuse nodes that differ from this machine.

    Args:
        versions: name and versions of each node. Two nodes on one machine have the same name.

    Raises:
        ClusterError: with every node that differs, and in what.
    """
    own = own_versions()
    faults = sorted((node, own.differences(theirs)) for node, theirs in versions)
    lines = [f"{node}: {', '.join(fault)}" for node, fault in faults if fault]
    if lines:
        raise ClusterError(
            "nodes of the cluster run something else than the driver:\n" + "\n".join(lines),
            place="resources.cluster",
            fix="install the same versions on these nodes and restart Ray there; `grpo cluster` compares all nodes",
        )
