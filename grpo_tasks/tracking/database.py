"""MLflow's SQLite database: a complete file or none, even when the process that creates or migrates it is killed.

MLflow migrates in place, and SQLite commits in between: a kill leaves tables that stop every later start. So a new file and the
migrated copy of an old one get their name when they are complete, and the old file keeps another one. Where a partial migration
cannot be completed, a file without runs is replaced, one with runs is refused.
"""

import logging
import os
import sqlite3
from contextlib import closing
from functools import cache
from itertools import count
from pathlib import Path

import sqlalchemy
from alembic.script import ScriptDirectory
from mlflow.store.db import utils
from mlflow.store.db.base_sql_model import Base
from sqlalchemy.engine import make_url

from grpo_tasks.kit.lock import file_lock
from schemas.errors import TrackingError, disk_full

USER_TABLES = ("runs", "logged_models", "registered_models", "trace_info")
"""Tables whose rows are a user's work."""
LOCK_TIMEOUT_S = 20.0

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
    """Make sure that a complete database with the schema of the installed MLflow is at `file`, or raise `TrackingError`."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if _is_ready(file):
            return
        with file_lock(lock_file(file, "create"), holder="a run that creates the store"):
            # Another process may have created it while this one waited for the lock.
            if not _is_ready(file):
                _build(file)
    except (OSError, sqlite3.Error) as fault:
        if disk_full(fault):
            fix = "free some disk space, then run the same command"
        elif "locked" in str(fault):
            fix = "end the processes that use it, then run the same command"
        else:
            fix = "name a file in a folder that you can write to"
        raise TrackingError(f"the database cannot be opened: {fault}", place=f"sqlite:///{file}", fix=fix) from fault


def _build(file: Path) -> None:
    new = file.with_name(f".{file.name}.new")
    # A killed attempt may have left one.
    _remove(new)
    if not file.exists() or not file.stat().st_size:
        _migrate(new)
        new.replace(file)
        return
    with closing(sqlite3.connect(file, timeout=LOCK_TIMEOUT_S, isolation_level=None)) as connection:
        # Rolls back what a killed writer left, so that no SQLite journal of the old file is applied to the new one.
        connection.execute("PRAGMA journal_mode = DELETE")
        # Every process can read it now, none can write.
        connection.execute("BEGIN IMMEDIATE")
        version = _version(connection)
        if version is not None and version not in _schema():
            raise TrackingError(
                f"another MLflow version made this store: the installed one does not know its schema {version}",
                place=str(file),
                fix="install the MLflow version that made it, or name another store with tracking.tracking_uri",
            )
        # A second connection: SQLite cannot copy from the one that holds the write lock.
        with closing(sqlite3.connect(new)) as copy, closing(sqlite3.connect(file)) as source:
            source.backup(copy)
        rows = _user_rows(connection)
        kept, done = "before-migration", "was migrated to the schema of the installed MLflow"
        try:
            _migrate(new)
            with closing(sqlite3.connect(new)) as migrated:
                if _user_rows(migrated) < rows:
                    raise sqlite3.DatabaseError("rows are missing afterwards")
        except Exception as fault:  # mlflow's migrations can raise anything
            if rows:
                raise TrackingError(
                    f"the store is half migrated (a migration was killed): {str(fault).strip().splitlines()[0][:300]}",
                    place=str(file),
                    fix=f"restore a backup; or mv {file} {file}.broken, and the next run creates a new store",
                ) from fault
            _remove(new)
            _migrate(new)
            kept, done = "unfinished", "was incomplete and held no run; a new store replaces it"
        names = (file.with_name(f"{file.name}.{kept}{f'-{number}' if number else ''}") for number in count())
        old = next(name for name in names if not name.exists())
        # A link, so that the file never lacks a name when the process is killed.
        os.link(file, old)
        _log.warning("%s %s; the old file is %s", file, done, old)
        new.replace(file)


@cache
def _schema() -> list[str]:
    """The revisions of the installed MLflow's schema, the newest last."""
    scripts = ScriptDirectory.from_config(utils._get_alembic_config(""))
    return [script.revision for script in scripts.walk_revisions()][::-1]


def _is_ready(file: Path) -> bool:
    # Connecting to a missing file would create an empty one.
    if not file.exists():
        return False
    with closing(sqlite3.connect(file)) as connection:
        # A migration writes the version last, so the current version means that every table is final.
        return _version(connection) == _schema()[-1] and set(Base.metadata.tables) <= _names(connection)


def _names(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _version(connection: sqlite3.Connection) -> str | None:
    if "alembic_version" not in _names(connection):
        return None
    found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return found[0] if found else None


def _user_rows(connection: sqlite3.Connection) -> int:
    """Rows that are a user's work. A killed migration may have left those of a table in its temporary copy."""
    names, rows = _names(connection), 0
    for table in USER_TABLES:
        found = [name for name in (table, f"_alembic_tmp_{table}") if name in names]
        counts = (connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in found)  # noqa: S608 - one of our own names
        rows += max(counts, default=0)
    return rows


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
    if not _is_ready(file):
        raise sqlite3.DatabaseError("the migrations ended without the tables of the installed MLflow")
    # Synced before the rename: otherwise a power cut could leave the final name on an empty file.
    with file.open("rb+") as written:
        os.fsync(written.fileno())


def _remove(new: Path) -> None:
    for path in (new, new.with_name(f"{new.name}-journal")):
        path.unlink(missing_ok=True)
