"""SHA-256 of files and folders, and the manifest of a step's folder: what has changed since it was taken.

What is published, proved or compared with a recorded hash is read. With `remembered=True` a large file is read only if its path,
size, mtime, ctime and inode are not known from an earlier time: for what a run refers to, such as the base model in every key.
Those hashes are in a small database in the user's cache folder; a write through a memory map may escape it.
"""

import hashlib
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_tasks.kit.files import is_unfinished
from grpo_tasks.processes.child import ERROR, RESULT
from schemas.results.base import OutputFile

REMEMBERED_BYTES = 1 << 20
"""Size from which the hash of a file is cached. Smaller files are read every time."""
NO_OUTPUTS = frozenset({RESULT, ERROR, "log.txt", "plots", "overview.png"})
"""What a manifest leaves out: no later step reads it, and some of it is written after the step has ended."""
_SETTLED_NS = 2_000_000_000
"""A file changed more recently than this could change again without a new timestamp, so its hash is not cached."""
_TABLE = "CREATE TABLE IF NOT EXISTS hashes (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, sha256 TEXT NOT NULL)"


def file_sha256(path: Path, *, remembered: bool = False) -> str:
    """SHA-256 (hex) of a file, or with `remembered` of what it was when its timestamps last changed. Raises OSError."""
    path = path.resolve()
    stamp = _stamp(path) if remembered else None
    if stamp is None:
        return _read(path)
    with suppress(OSError, RuntimeError, sqlite3.Error), closing(_database()) as connection:
        query = "SELECT sha256 FROM hashes WHERE path = ? AND stamp = ?"
        if found := connection.execute(query, (str(path), stamp)).fetchone():
            return str(found[0])
    sha256 = _read(path)
    # If the stamp changed while the file was read, the hash may belong to neither stamp.
    status = path.stat()
    if _stamp(path) == stamp and time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        # Without the cache the file is read again the next time; nothing else is lost.
        with suppress(OSError, RuntimeError, sqlite3.Error), closing(_database()) as connection:
            connection.execute("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?)", (str(path), stamp, sha256))
    return sha256


def folder_sha256(folder: Path, *, remembered: bool = False) -> str:
    """SHA-256 (hex) over the names and contents of all files below a folder; `remembered` as for `file_sha256`."""
    return digest_of(
        (path.relative_to(folder).as_posix(), file_sha256(path, remembered=remembered)) for path in files_below(folder)
    )


def digest_of(files: Iterable[tuple[str, str]]) -> str:
    """`folder_sha256` from relative names (with slashes) and hashes alone; sorted by name."""
    digest = hashlib.sha256()
    for name, sha256 in sorted(files):
        digest.update(name.encode() + b"\0")
        digest.update(bytes.fromhex(sha256))
    return digest.hexdigest()


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, sorted; links to files included."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> str | None:
    """A text that changes whenever a large file changes; None for a small file."""
    status = path.stat()
    if status.st_size < REMEMBERED_BYTES:
        return None
    return f"{status.st_size}/{status.st_mtime_ns}/{status.st_ctime_ns}/{status.st_dev}/{status.st_ino}"


def cache_folder() -> Path:
    """Where the hashes of large files are remembered. It may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-pipeline"


def _database() -> sqlite3.Connection:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # isolation_level=None: every statement is a transaction of its own, so no process holds the lock for long.
    connection = sqlite3.connect(folder / "hashes.db", timeout=5.0, isolation_level=None)
    connection.execute(_TABLE)
    return connection


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
