"""A store that is killed while it is created or migrated, and a store that several processes open first at once."""

import os
import shutil
import signal
import sqlite3
import sys
from contextlib import closing
from functools import partial

import pytest
import sqlalchemy
from alembic import command
from mlflow.store.db import utils
from mlflow.store.tracking.dbmodels.initial_models import Base as InitialBase

from grpo_tasks.tracking.store import connect
from schemas.errors import TrackingError
from tests.kill_at import at_once, is_killed_at, preload_only

SQL = "sqlalchemy.execute"
OLD = "bda7b8c39065"
"""A revision of mlflow's schema that lacks some of the current tables."""


def audited(work, only="", **arguments):
    """Run the work with an audit event before each SQL statement that contains these words."""

    def before_statement(*arguments):
        if only in arguments[2]:
            sys.audit(SQL)

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", before_statement)
    work(**arguments)


def migrate_in_place(uri, revision="heads"):
    """Migrate the file itself, as mlflow does."""
    engine = utils.create_sqlalchemy_engine(uri)
    InitialBase.metadata.create_all(engine)
    config = utils._get_alembic_config(uri)
    config.attributes["connection"] = engine.connect()
    command.upgrade(config, revision)
    engine.dispose()


def kill_migration(uri, words):
    """Kill a migration in place before its first statement with these words."""
    assert is_killed_at(1, partial(audited, migrate_in_place, only=words, uri=uri), frozenset({SQL}))


def insert_run(file, name="kept"):
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("INSERT INTO experiments (experiment_id, name, lifecycle_stage) VALUES (7, 'old', 'active')")
        columns = "(run_uuid, name, experiment_id, lifecycle_stage, status, start_time, source_type, user_id)"
        connection.execute(f"INSERT INTO runs {columns} VALUES ('r1', ?, 7, 'active', 'FINISHED', 1, 'LOCAL', 'me')", [name])
        connection.commit()


@pytest.fixture(scope="module", autouse=True)
def _light_children():
    preload_only("grpo_tasks.tracking.store")


@pytest.fixture(scope="module")
def old_store(tmp_path_factory):
    """A store of an older MLflow with one run."""
    file = tmp_path_factory.mktemp("old") / "mlflow.db"
    migrate_in_place(f"sqlite:///{file}", OLD)
    insert_run(file)
    return file


@pytest.fixture
def uri(tmp_path):
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "mlflow.db"


def run_names(uri):
    client = connect(uri).client
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return [run.info.run_name for run in client.search_runs(experiments)]


@pytest.mark.slow
def test_a_store_killed_in_its_creation_is_created_by_the_next(uri, file):
    work = partial(audited, connect, uri=uri)
    for statement in (2, 40, 300):
        assert is_killed_at(statement, work, frozenset({SQL}))
        assert not file.exists()
    # The rename is the last change to a file.
    assert is_killed_at(1, work, frozenset({"os.rename"}), str(file.parent))
    assert not file.exists()
    assert run_names(uri) == []
    assert [path.name for path in file.parent.iterdir() if not path.is_dir()] == ["mlflow.db"]


@pytest.mark.slow
def test_several_processes_can_open_a_new_store_at_once(uri):
    assert at_once(3, partial(connect, uri)) == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["INSERT INTO _alembic_tmp_runs", "CREATE TABLE registered_models"])
def test_a_store_without_runs_is_usable_after_a_killed_migration_in_place(uri, words):
    kill_migration(uri, words)
    assert run_names(uri) == []


def make_irreparable(file):
    """A table that a migration creates exists already, with a row."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE evaluation_datasets (something_else TEXT)")
        connection.execute("INSERT INTO evaluation_datasets VALUES ('x')")
        connection.commit()


@pytest.mark.slow
def test_an_irreparable_store_without_runs_is_replaced_and_kept_under_another_name(uri, file, caplog):
    migrate_in_place(uri, OLD)
    make_irreparable(file)
    before = file.read_bytes()
    assert run_names(uri) == []
    assert file.with_name("mlflow.db.unfinished").read_bytes() == before
    assert "a new store replaces it" in caplog.text


@pytest.mark.slow
def test_an_older_mlflow_store_is_migrated_completely_or_not_at_all(old_store, uri, file):
    shutil.copy(old_store, file)
    before = file.read_bytes()
    assert is_killed_at(40, partial(audited, connect, uri=uri), frozenset({SQL}))
    assert file.read_bytes() == before
    assert run_names(uri) == ["kept"]
    assert file.with_name("mlflow.db.before-migration").read_bytes() == before


@pytest.mark.parametrize("words", ["INSERT INTO _alembic_tmp_", "RENAME TO", "a table with a row"])
def test_a_half_migrated_store_with_runs_is_refused_and_not_changed(old_store, uri, file, words):
    shutil.copy(old_store, file)
    if words.startswith("a table"):
        make_irreparable(file)
    else:
        kill_migration(uri, words)
    # What a killed writer left in SQLite's own journal is rolled back first.
    with closing(sqlite3.connect(file)) as connection:
        before = list(connection.iterdump())
    with pytest.raises(TrackingError, match="half migrated") as caught:
        connect(uri)
    assert "mv" in caught.value.fix
    with closing(sqlite3.connect(file)) as connection:
        assert list(connection.iterdump()) == before


def test_a_store_of_a_newer_mlflow_is_refused_and_not_changed(old_store, uri, file):
    shutil.copy(old_store, file)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        connection.commit()
    before = file.read_bytes()
    with pytest.raises(TrackingError, match="ffffffffffff"):
        connect(uri)
    assert file.read_bytes() == before


def test_a_killed_writers_sqlite_journal_is_not_applied(old_store, uri, file):
    shutil.copy(old_store, file)
    pid = os.fork()
    if pid == 0:
        connection = sqlite3.connect(file)
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("UPDATE runs SET name = 'torn'")
        rows = [[f"m{number}"] for number in range(9999)]
        connection.executemany("INSERT INTO metrics (key, value, timestamp, run_uuid) VALUES (?, 1, 1, 'r1')", rows)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert file.with_name("mlflow.db-journal").exists()
    assert run_names(uri) == ["kept"]
