"""SHA-256 of files and folders. A large file that has not changed is hashed once, not once a run.

    file_sha256(path)        small file: always read      large file: read, unless (path, size, mtime, ctime, inode) is known
    folder_sha256(folder)    names and contents of all its files, in order of their names

What is known of large files is kept in a small database in the user's cache folder, shared by all processes. Writing to a file in
place changes its ctime even when its mtime is put back, so a changed file is always read again. Where the cache cannot be
written, every file is read each time.
"""

import hashlib
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

REMEMBERED_BYTES = 1 << 20
"""Size from which the hash of a file is remembered; smaller files are read every time."""
_SETTLED_NS = 2_000_000_000
"""A file written to more recently than this may change again within one tick of its clock, so its hash is not remembered."""
_TABLE = "CREATE TABLE IF NOT EXISTS hashes (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, sha256 TEXT NOT NULL)"


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes.

    Raises:
        OSError: the file cannot be read.
    """
    path = path.resolve()
    stamp = _stamp(path)
    if stamp is None:
        return _read(path)
    known = _recall(path, stamp)
    if known is not None:
        return known
    sha256 = _read(path)
    # Only what was the same before and after it was read is the hash of that stamp.
    if _stamp(path) == stamp and _settled(path):
        _remember(path, stamp, sha256)
    return sha256


def folder_sha256(folder: Path) -> str:
    """SHA-256 (hex) over the names and contents of all files below a folder."""
    return digest_of((path.relative_to(folder).as_posix(), file_sha256(path)) for path in files_below(folder))


def digest_of(files: Iterable[tuple[str, str]]) -> str:
    """The same from the files' names (relative, with slashes) and hashes alone; in order of the names."""
    digest = hashlib.sha256()
    for name, sha256 in sorted(files):
        digest.update(name.encode() + b"\0")
        digest.update(bytes.fromhex(sha256))
    return digest.hexdigest()


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, links to files included."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> str | None:
    """What changes whenever a large file does; None for a small one."""
    status = path.stat()
    if status.st_size < REMEMBERED_BYTES:
        return None
    return f"{status.st_size}/{status.st_mtime_ns}/{status.st_ctime_ns}/{status.st_dev}/{status.st_ino}"


def _settled(path: Path) -> bool:
    status = path.stat()
    return time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS


def _database() -> sqlite3.Connection:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-pipeline"
    folder.mkdir(parents=True, exist_ok=True)
    # Every statement is a transaction of its own.
    connection = sqlite3.connect(folder / "hashes.db", timeout=5.0, isolation_level=None)
    connection.execute(_TABLE)
    return connection


def _recall(path: Path, stamp: str) -> str | None:
    try:
        with closing(_database()) as connection:
            query = "SELECT sha256 FROM hashes WHERE path = ? AND stamp = ?"
            found = connection.execute(query, (str(path), stamp)).fetchone()
    except (OSError, RuntimeError, sqlite3.Error):
        return None
    return found[0] if found else None


def _remember(path: Path, stamp: str, sha256: str) -> None:
    try:
        with closing(_database()) as connection:
            connection.execute("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?)", (str(path), stamp, sha256))
    except (OSError, RuntimeError, sqlite3.Error):
        # A cache that cannot be written costs time, nothing else.
        return
