"""The manifest of a step's folder: path, size and SHA-256 of every output file, and the files that changed since.

    folder --take_manifest--> (OutputFile, ...) --find_changes--> [Change("final/adapter_model.safetensors", "changed")]

Logs, plots and the result itself are not outputs: no later step reads them, and some are written after the step has ended.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_tasks.content.hashes import digest_of, file_sha256, files_below
from grpo_tasks.kit.files import is_unfinished
from grpo_tasks.processes.child import ERROR, RESULT
from schemas.results.base import OutputFile

NO_OUTPUTS = frozenset({RESULT, ERROR, "log.txt", "plots", "overview.png"})
"""Files and folders directly in the step's folder that a manifest leaves out."""


@dataclass(frozen=True, slots=True)
class Change:
    """A file that differs from the manifest."""

    path: str
    what: Literal["missing", "changed"]

    def __str__(self) -> str:
        return f"{self.path} is {'missing' if self.what == 'missing' else 'not what the step wrote'}"


def take_manifest(folder: Path, names: tuple[str, ...] = ()) -> tuple[OutputFile, ...]:
    """Every output file of a step's folder, sorted by path; with `names` only those that are, or lie below, one of them."""
    found = ((path, path.relative_to(folder)) for path in files_below(folder))
    return tuple(
        OutputFile(path=name.as_posix(), bytes=path.stat().st_size, sha256=file_sha256(path))
        for path, name in found
        if name.parts[0] not in NO_OUTPUTS and not is_unfinished(name.name) and (not names or name.parts[0] in names)
    )


def find_changes(folder: Path, manifest: Iterable[OutputFile]) -> list[Change]:
    """The files of the manifest that are missing or differ. Files that the manifest does not list are ignored."""
    changes = []
    for file in manifest:
        path = folder / file.path
        if not path.is_file():
            changes.append(Change(file.path, "missing"))
        # The size first: most damage changes it, and it costs no reading.
        elif path.stat().st_size != file.bytes or file_sha256(path) != file.sha256:
            changes.append(Change(file.path, "changed"))
    return changes


def outputs_sha256(manifest: Iterable[OutputFile], names: tuple[str, ...]) -> str:
    """SHA-256 (hex) over the files of a manifest that are, or lie below, one of `names`."""
    below = tuple(f"{name}/" for name in names)
    return digest_of((file.path, file.sha256) for file in manifest if f"{file.path}/".startswith(below))
