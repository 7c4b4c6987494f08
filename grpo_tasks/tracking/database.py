"""MLflow's SQLite database: a complete file or none, even when the process that creates or migrates it is killed.

    no file                ->  created under another name, then renamed
    an older schema        ->  a copy is migrated, then renamed; the old file is kept under another name
    a partial migration    ->  the same. If the copy cannot be migrated: a file without runs is replaced, one with runs is refused

MLflow migrates in place, and SQLite commits in between: a kill leaves tables that stop every later start. All uses of mlflow's
private migration functions are in this module.
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

from grpo_tasks.kit.lock import alone
from schemas.errors import TrackingError, disk_full

TEMPORARY = "_alembic_tmp_"
"""Prefix of the tables that a migration fills before it renames them to the tables they replace."""
USER_TABLES = ("runs", "logged_models", "registered_models", "trace_info")
"""Tables whose rows are a user's work."""
LOCK_TIMEOUT_S = 20.0
REPAIRS = 50
"""Attempts at an interrupted migration. Each removes one thing that the interrupted attempt had already created."""

_log = logging.getLogger(__name__)


def sqlite_file(uri: str) -> Path | None:
    """The file behind an SQLite address; None for any other address and for a database in memory."""
    if not uri.startswith("sqlite"):
        return None
    name = make_url(uri).database
    return None if not name or name == ":memory:" or name.startswith("file:") else Path(name).resolve()


def lock_file(file: Path, what: str) -> Path:
    """The file of the lock `what` on a database."""
    return file.with_name(f".{file.name}.locks") / what


def make_ready(file: Path) -> None:
    """Make sure that a complete database with the schema of the installed MLflow is at `file`. After a kill, call it again.

    Raises:
        TrackingError: the file is no database, is in use, was made by a newer MLflow, or is broken and holds runs.
    """
    with _tracking_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if _is_ready(file):
            return
        with alone(lock_file(file, "create"), who="a run that creates the store"):
            # Another process may have created it while this one waited for the lock.
            if not _is_ready(file):
                _make_ready(file)


def _make_ready(file: Path) -> None:
    new = file.with_name(f".{file.name}.new")
    # A killed attempt may have left one.
    _remove(new)
    if not _tables(file):
        _migrate(new)
        _move(new, file)
        return
    with _write_lock(file) as connection:
        _refuse_newer(file, connection)
        # A second connection: SQLite cannot copy from the one that holds the write lock.
        with closing(sqlite3.connect(new)) as copy, closing(sqlite3.connect(file)) as source:
            source.backup(copy)
        rows = _count_user_rows(connection)
        fault = _try_migrate(new, rows)
        if fault is not None and any(rows.values()):
            raise _irreparable(file, fault) from fault
        if fault is not None:
            _remove(new)
            _migrate(new)
            kept = _keep(file, "half-made")
            _log.warning("%s was incomplete and held no run; a new store replaces it, the old file is %s", file, kept)
        elif any(rows.values()):
            kept = _keep(file, "before-migration")
            _log.warning("%s was migrated to the schema of the installed MLflow; the old file is %s", file, kept)
        _move(new, file)


def _irreparable(file: Path, fault: Exception) -> TrackingError:
    message = str(fault).strip().splitlines()[0][:300]
    return TrackingError(
        f"the store is half migrated (a migration was killed) and cannot be repaired: {message}",
        place=str(file),
        fix=f"restore a backup; or move the file away (mv {file} {file}.broken), and the next run creates a new store",
    )


def _is_ready(file: Path) -> bool:
    # Connecting to a missing file would create an empty one.
    if not file.exists():
        return False
    with closing(sqlite3.connect(file)) as connection:
        return _is_complete(connection)


def _is_complete(connection: sqlite3.Connection) -> bool:
    # A migration writes the version last, so the current version means that every table is final.
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
            f"another MLflow version made this store: the installed one does not know its schema {version}",
            place=str(file),
            fix="install the MLflow version that made it, or name another store with tracking.tracking_uri",
        )


def _count_user_rows(connection: sqlite3.Connection) -> dict[str, int]:
    """Rows of each user table; a killed migration may have left them in the table or in its temporary copy."""
    names = _names(connection)
    copies = {table: [name for name in (table, TEMPORARY + table) if name in names] for table in USER_TABLES}
    return {table: max((_rows(connection, name) for name in found), default=0) for table, found in copies.items()}


def _rows(connection: sqlite3.Connection, table: str) -> int:
    return int(connection.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0])  # noqa: S608 - one of our own names


def _try_migrate(file: Path, expected: dict[str, int]) -> Exception | None:
    """Migrate a copy to the installed MLflow's schema and check that no user row is lost; the error, if there was one."""
    try:
        with closing(sqlite3.connect(file)) as connection:
            _restore_tables(connection)
        for _ in range(REPAIRS):
            try:
                _migrate(file)
                break
            except sqlalchemy.exc.OperationalError as fault:
                if not _undo(file, fault):
                    raise
        with closing(sqlite3.connect(file)) as connection:
            lost = [table for table, rows in expected.items() if rows > _count_user_rows(connection)[table]]
            return sqlite3.DatabaseError(f"rows of {', '.join(lost)} are missing afterwards") if lost else None
    except Exception as fault:  # mlflow's migrations can raise anything; this copy is then not used
        return fault


def _restore_tables(connection: sqlite3.Connection) -> None:
    """Undo the rebuilding of a table: drop its temporary copy, or rename the copy if the original is already dropped."""
    names = _names(connection)
    for copy in sorted(name for name in names if name.startswith(TEMPORARY)):
        original = copy.removeprefix(TEMPORARY)
        connection.execute(f'DROP TABLE "{copy}"' if original in names else f'ALTER TABLE "{copy}" RENAME TO "{original}"')
    connection.commit()


def _undo(file: Path, fault: sqlalchemy.exc.OperationalError) -> bool:
    """Remove the table, index or column that a killed revision had already created; False when the fault names none."""
    message, statement = str(fault.orig), fault.statement or ""
    table = re.match(r"table (\w+) already exists", message)
    index = re.match(r"index (\w+) already exists", message)
    column = re.match(r"\s*ALTER TABLE (\w+) ADD COLUMN (\w+)", statement) if "duplicate column name" in message else None
    with closing(sqlite3.connect(file)) as connection:
        # A table with rows is not one that the killed revision had just created.
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
    """Run all of mlflow's migrations on a file that no other process uses."""
    engine = utils.create_sqlalchemy_engine(f"sqlite:///{file}")

    @sqlalchemy.event.listens_for(engine, "connect")
    def _skip_syncs(connection: sqlite3.Connection, _: object) -> None:
        # After a power cut this file is thrown away. It is synced once, before it is renamed.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA journal_mode = MEMORY")

    try:
        with closing(sqlite3.connect(file)) as connection:
            has_version = _version(connection) is not None
        (utils._upgrade_db if has_version else utils._initialize_tables)(engine)
    finally:
        engine.dispose()
    with closing(sqlite3.connect(file)) as connection:
        if not _is_complete(connection):
            raise sqlite3.DatabaseError("the migrations ended without the tables of the installed MLflow")


@contextmanager
def _write_lock(file: Path) -> Iterator[sqlite3.Connection]:
    """The database with its write lock held: every process can read it, none can write.

    Opening it rolls back what a killed writer left, so that no SQLite journal of the old file is applied to the new one.
    """
    with closing(sqlite3.connect(file, timeout=LOCK_TIMEOUT_S, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def _keep(file: Path, why: str) -> Path:
    """Give the file a second name. A link, so that the file never lacks a name when the process is killed."""
    names = (file.with_name(f"{file.name}.{why}{f'-{number}' if number else ''}") for number in count())
    kept = next(name for name in names if not name.exists())
    os.link(file, kept)
    return kept


def _move(new: Path, file: Path) -> None:
    # Synced before the rename: otherwise a power cut could leave the final name on an empty file.
    with new.open("rb+") as written:
        os.fsync(written.fileno())
    new.replace(file)


def _remove(new: Path) -> None:
    for path in (new, new.with_name(f"{new.name}-journal")):
        path.unlink(missing_ok=True)


@contextmanager
def _tracking_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as fault:
        if disk_full(fault):
            fix = "free some disk space, then run the same command"
        elif "locked" in str(fault):
            fix = "end the processes that use it, then run the same command"
        else:
            fix = "name a file in a folder that you can write to"
        raise TrackingError(f"the database cannot be opened: {fault}", place=f"sqlite:///{file}", fix=fix) from fault
