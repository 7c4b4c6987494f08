"""MLflow's SQLite database as a whole file or not at all.

    no file          ->  made aside, moved into place
    an older schema  ->  a copy is migrated, then moved into place; the file from before stays beside it
    a half-made one  ->  the same; one that cannot be migrated and holds nothing is set aside, one that holds runs is refused

MLflow migrates a database in place and SQLite commits in between: a kill leaves tables `_alembic_tmp_*` that stop every later
start, and two first openings run into each other. Here all of it happens to a file of another name, under a lock. This module
knows some of mlflow's private functions, which is why it is one. What it does not do: other databases; theirs roll back.
"""

import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import sqlalchemy
from alembic.script import ScriptDirectory
from mlflow.store.db import utils
from mlflow.store.db.base_sql_model import Base
from sqlalchemy.engine import make_url

from grpo_tasks.processes.lock import alone
from schemas.errors import TrackingError

HALF = "_alembic_tmp_"
"""Prefix of the tables that a migration fills before they take another's place."""
CONTENT = ("runs", "logged_models", "registered_models", "trace_info")
"""Tables of which a row is somebody's work."""
USED_LIMIT_S = 20.0
REPAIRS = 50
"""Attempts at a migration that was killed; each takes back one thing that is there already."""

_log = logging.getLogger(__name__)


def sqlite_file(uri: str) -> Path | None:
    """The file behind an SQLite address; None for any other address, and for a database in memory."""
    if not uri.startswith("sqlite"):
        return None
    name = make_url(uri).database
    return None if not name or name == ":memory:" or name.startswith("file:") else Path(name).resolve()


def lock_file(file: Path, what: str) -> Path:
    """The file of a lock on a database."""
    return file.with_name(f".{file.name}.locks") / what


def make_ready(file: Path) -> None:
    """Leave a whole database of this MLflow's schema at `file`. Killed anywhere, the next call does.

    Raises:
        TrackingError: the file is no database, is in use, was made by a newer MLflow, or is broken and holds runs.
    """
    with _faults_of(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if _is_ready(file):
            return
        with alone(lock_file(file, "create"), who="a run that creates the store"):
            if not _is_ready(file):
                _make_ready(file)


def _make_ready(file: Path) -> None:
    aside = file.with_name(f".{file.name}.new")
    _remove(aside)
    if not _tables(file):
        _migrate(aside)
        _move(aside, file)
        return
    with _nobody_else_writes(file) as connection:
        _refuse_newer(file, connection)
        with closing(sqlite3.connect(aside)) as copy, closing(sqlite3.connect(file)) as source:
            # A connection that holds the lock cannot be copied from.
            source.backup(copy)
        content = _content(connection)
        fault = _try_migrate(aside, content)
        if fault is not None and any(content.values()):
            raise _beyond_repair(file, fault) from fault
        if fault is not None:
            _remove(aside)
            _migrate(aside)
            kept = _keep(file, "half-made")
            _log.warning("%s was half made and held no run; a new store takes its place, the old file is %s", file, kept)
        elif any(content.values()):
            kept = _keep(file, "before-migration")
            _log.warning("%s was migrated to the schema of this MLflow; the file from before is %s", file, kept)
        _move(aside, file)


def _beyond_repair(file: Path, fault: Exception) -> TrackingError:
    said = str(fault).strip().splitlines()[0][:300]
    return TrackingError(
        f"the store is half migrated (a migration was killed) and cannot be repaired: {said}",
        place=str(file),
        fix=f"restore a copy from before; or move the file away (mv {file} {file}.broken), and the next run makes a new store",
    )


def _is_ready(file: Path) -> bool:
    # Whoever asks for the tables of a file that is not there makes an empty one, which is nobody's store.
    if not file.exists():
        return False
    with closing(sqlite3.connect(file)) as connection:
        return _is_whole(connection)


def _is_whole(connection: sqlite3.Connection) -> bool:
    # The version is written last.
    return _version(connection) == _head() and set(Base.metadata.tables) <= _names(connection)


def _tables(file: Path) -> set[str]:
    if not file.exists():
        return set()
    with closing(sqlite3.connect(file)) as connection:
        return _names(connection)


def _names(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _version(connection: sqlite3.Connection) -> str | None:
    if "alembic_version" not in _names(connection):
        return None
    found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return found[0] if found else None


@cache
def _head() -> str:
    return str(utils._get_latest_schema_revision())


def _refuse_newer(file: Path, connection: sqlite3.Connection) -> None:
    version = _version(connection)
    known = {script.revision for script in ScriptDirectory.from_config(utils._get_alembic_config("")).walk_revisions()}
    if version is not None and version not in known:
        raise TrackingError(
            f"another MLflow made this store: its schema {version} is not known here",
            place=str(file),
            fix="install the MLflow that made it, or name another store with tracking.tracking_uri",
        )


def _content(connection: sqlite3.Connection) -> dict[str, int]:
    """Rows of the tables that hold somebody's work, wherever a killed migration left them."""
    names = _names(connection)
    places = {table: [name for name in (table, HALF + table) if name in names] for table in CONTENT}
    return {table: max((_rows(connection, name) for name in found), default=0) for table, found in places.items()}


def _rows(connection: sqlite3.Connection, table: str) -> int:
    return int(connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])  # noqa: S608 - one of our own names


def _try_migrate(file: Path, content: dict[str, int]) -> Exception | None:
    """Bring a copy to this MLflow's schema; what went wrong, if anything did."""
    try:
        with closing(sqlite3.connect(file)) as connection:
            _put_back(connection)
        for _ in range(REPAIRS):
            try:
                _migrate(file)
                break
            except sqlalchemy.exc.OperationalError as fault:
                if not _undo(file, fault):
                    raise
        with closing(sqlite3.connect(file)) as connection:
            lost = [table for table, rows in content.items() if rows > _content(connection)[table]]
            return sqlite3.DatabaseError(f"rows of {', '.join(lost)} are missing afterwards") if lost else None
    except Exception as fault:  # a migration is somebody else's program on data that may be anything
        return fault


def _put_back(connection: sqlite3.Connection) -> None:
    """Undo a table that was being rebuilt: its new form goes, unless the old one has gone already."""
    names = _names(connection)
    for table in sorted(name for name in names if name.startswith(HALF)):
        whole = table.removeprefix(HALF)
        connection.execute(f'DROP TABLE "{table}"' if whole in names else f'ALTER TABLE "{table}" RENAME TO "{whole}"')
    connection.commit()


def _undo(file: Path, fault: sqlalchemy.exc.OperationalError) -> bool:
    """Take back a table, index or column that the revision made before it was killed and now makes again; whether it was one."""
    said, statement = str(fault.orig), fault.statement or ""
    table = re.match(r"table (\w+) already exists", said)
    index = re.match(r"index (\w+) already exists", said)
    column = re.match(r"\s*ALTER TABLE (\w+) ADD COLUMN (\w+)", statement) if "duplicate column name" in said else None
    with closing(sqlite3.connect(file)) as connection:
        if table and _rows(connection, table[1]):
            return False
        if table:
            connection.execute(f"DROP TABLE {table[1]}")
        elif index:
            connection.execute(f"DROP INDEX {index[1]}")
        elif column:
            connection.execute(f"ALTER TABLE {column[1]} DROP COLUMN {column[2]}")
        return bool(table or index or column)


def _migrate(file: Path) -> None:
    """All of mlflow's migrations on a file that nobody else knows."""
    engine = utils.create_sqlalchemy_engine(f"sqlite:///{file}")

    @sqlalchemy.event.listens_for(engine, "connect")
    def _hurry(connection: sqlite3.Connection, _: object) -> None:
        # Nobody needs this file after a power cut; it is written through once, before it is moved.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA journal_mode = MEMORY")

    try:
        with closing(sqlite3.connect(file)) as connection:
            begun = _version(connection) is not None
        (utils._upgrade_db if begun else utils._initialize_tables)(engine)
    finally:
        engine.dispose()
    with closing(sqlite3.connect(file)) as connection:
        if not _is_whole(connection):
            raise sqlite3.DatabaseError("the migrations ended without the tables of this MLflow")


@contextmanager
def _nobody_else_writes(file: Path) -> Iterator[sqlite3.Connection]:
    """The database, readable by all and writable by nobody.

    Opening it rolls back what a killed writer left, so that no journal outlives the file.
    """
    with closing(sqlite3.connect(file, timeout=USED_LIMIT_S, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def _keep(file: Path, why: str) -> Path:
    """The file under a second name, so that it is never without one."""
    names = (file.with_name(f"{file.name}.{why}{f'-{number}' if number else ''}") for number in count())
    kept = next(name for name in names if not name.exists())
    os.link(file, kept)
    return kept


def _move(aside: Path, file: Path) -> None:
    with aside.open("rb+") as written:
        os.fsync(written.fileno())
    aside.replace(file)


def _remove(aside: Path) -> None:
    for path in (aside, aside.with_name(f"{aside.name}-journal")):
        path.unlink(missing_ok=True)


@contextmanager
def _faults_of(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as fault:
        used = "locked" in str(fault)
        raise TrackingError(
            f"the database cannot be opened: {fault}",
            place=f"sqlite:///{file}",
            fix="end the processes that use it, then run the same command"
            if used
            else "give a file in a folder you may write to",
        ) from fault
