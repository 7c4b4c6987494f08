"""Names that the registry takes, errors with their fix, patience, locks, and what two processes write at once."""

import os
import shutil
import socket
import sqlite3
import string
import tempfile
import time
from functools import partial
from types import SimpleNamespace

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.exceptions import INVALID_PARAMETER_VALUE, MlflowException
from mlflow.store.artifact.utils.models import _parse_model_uri
from pydantic import TypeAdapter, ValidationError

from grpo_tasks.tracking import store as room
from grpo_tasks.tracking.past_runs import registered_versions
from grpo_tasks.tracking.registry import find_version
from grpo_tasks.tracking.runs import KEY_TAG, open_run
from grpo_tasks.tracking.store import check_store, connect, open_store, resolve_uri
from schemas.config.operations import TrackingConfig
from schemas.config.types import MlflowName
from schemas.errors import ModelError, StoreAwayError, TrackingError, UserError
from tests.answering import answering
from tests.kill_at import at_once, preload_only
from tests.ports import free_ports


@pytest.fixture(scope="module", autouse=True)
def _light_children():
    preload_only("grpo_tasks.tracking.runs")


def mlflow_takes(client, run_id, name):
    """Whether MLflow registers a model of this name, finds the version of a run, and reads an address of one as we write it."""
    try:
        client.create_registered_model(name)
        client.create_model_version(name, "file:///nowhere", run_id)
        found = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
        uri = _parse_model_uri(f"models:/{name}@champion")
    except MlflowException:
        return False
    return len(found) == 1 and (uri.name, uri.alias) == (name, "champion")


def test_the_config_takes_the_names_that_mlflow_takes(database):
    client, ours = MlflowClient(database), TypeAdapter(MlflowName)
    run_id = client.create_run(client.create_experiment("names")).info.run_id
    for name in [f"a{sign}b" for sign in string.punctuation] + ["'", "\\", "a\\", "..", ".", " ", "?", "it's", "ü 1"]:
        try:
            refused = ours.validate_python(name) != name
        except ValidationError:
            refused = True
        # We refuse more: NAME@ALIAS is a reference, ".." a folder, and MLflow takes a backslash anywhere but at the end.
        assert refused == (not mlflow_takes(client, run_id, name)) or (refused and name in ("a@b", "..", "a\\b")), name


def test_a_name_that_another_program_registered_hides_no_other_model(database):
    client, tracking, names = MlflowClient(database), TrackingConfig(tracking_uri=database), ("it's", "a\\", "plain")
    for name in names:
        client.create_registered_model(name)
        client.create_model_version(name, "file:///nowhere")
    assert {line.name for line in registered_versions(tracking)} == {*names}
    for name in names:
        with pytest.raises(ModelError, match="no such model") as unknown:
            find_version(f"{name}/7", tracking)
        assert f"versions of {name}: 1" in unknown.value.fix


@pytest.mark.parametrize(
    ("kind", "says", "fix"),
    [
        ("login refused", "401", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"),
        ("login page", "not MLflow, or a page to sign in", "MLFLOW_TRACKING_URI"),
        ("another server", "not MLflow", "http://HOST:PORT"),
        ("another page", "not MLflow", "http://HOST:PORT"),
    ],
)
def test_a_server_that_is_none_of_mlflow_is_named_with_the_variable(monkeypatch, kind, says, fix):
    monkeypatch.setattr(room, "CHECK_S", 1.0)
    with answering(kind) as address, pytest.raises(TrackingError) as refused:
        check_store(TrackingConfig(tracking_uri=address))
    assert says in refused.value.message
    assert fix in refused.value.fix
    assert refused.value.place == address


@pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)
def test_a_store_that_answers_is_counted_without_changing_mlflows_globals(database):
    before = mlflow.get_tracking_uri()
    with open_store(TrackingConfig(tracking_uri=database)).as_default():
        assert mlflow.get_tracking_uri() == database
        assert check_store(TrackingConfig(tracking_uri=database)) >= 1
    assert mlflow.get_tracking_uri() == before
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_a_database_server_that_is_away_is_reported_at_once(monkeypatch):
    """MLflow itself would try for two minutes."""
    monkeypatch.setattr(room, "CHECK_S", 0.0)
    monkeypatch.setattr("mlflow.store.db.utils.time", SimpleNamespace(sleep=lambda _: pytest.fail("MLflow tries again")))
    with pytest.raises(TrackingError, match=r"Connection refused|not installed"):
        connect(f"postgresql://127.0.0.1:{free_ports(1)[0]}/mlflow")


def test_an_impossible_or_unreachable_store_is_named_with_its_fix(monkeypatch):
    began = time.monotonic()
    uri, away = "sqlite:////proc/nothing/mlflow.db", f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(TrackingError, match="cannot be opened") as caught:
        open_store(TrackingConfig(tracking_uri=uri))
    assert caught.value.place == uri
    assert caught.value.fix
    assert time.monotonic() - began < 5, "it is known at once"
    monkeypatch.setattr(room, "FIRST_S", 0.5)
    with pytest.raises(StoreAwayError) as caught:
        open_store(TrackingConfig(tracking_uri=away)).call(lambda client: client.search_experiments())
    assert caught.value.place == away
    assert "it resumes" in caught.value.fix


def test_the_uri_in_the_environment_is_the_default(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_uri(TrackingConfig()) == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert resolve_uri(TrackingConfig()) == "http://127.0.0.1:5000"
    assert resolve_uri(TrackingConfig(tracking_uri="sqlite:///x.db")) == "sqlite:///x.db"


def test_a_process_that_changes_its_directory_records_there(empty_database, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        shutil.copy(empty_database, tmp_path / name / "mlflow.db")
        monkeypatch.chdir(tmp_path / name)
        open_store(TrackingConfig()).call(lambda client, name=name: client.create_registered_model(name))
    for name in ("first", "second"):
        with sqlite3.connect(tmp_path / name / "mlflow.db") as database:
            assert database.execute("SELECT name FROM registered_models").fetchall() == [(name,)]


def test_a_process_of_a_run_is_as_patient_as_it():
    began = time.monotonic()
    with answering("error") as address:
        store = open_store(TrackingConfig(tracking_uri=address, patience_s=0.5), known=True)
        with pytest.raises(StoreAwayError):
            store.call(lambda client: client.search_experiments())
    assert time.monotonic() - began < 4
    fault = MlflowException("two files failed:\n\n##### File a #####\nNo such artifact: 'a'", error_code=INVALID_PARAMETER_VALUE)
    assert store.error(fault).message == "two files failed:\n##### File a #####\nNo such artifact: 'a'"


def test_an_interrupted_run_does_not_wait_for_a_silent_server():
    def search_when_interrupted(address):
        store = open_store(TrackingConfig(tracking_uri=address, patience_s=60.0), known=True)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            store.call(lambda client: client.search_experiments())

    began = time.monotonic()
    # It takes the connection and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreAwayError):
        search_when_interrupted(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - began < 6


@pytest.mark.parametrize("folder", ["open to others", "private"])
def test_a_link_in_the_temporary_folder_empties_no_file(tmp_path, monkeypatch, folder):
    """Another user knows the name of a lock, and makes a link of that name to a file that only its victim can write to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = connect("http://127.0.0.1:5000")
    lock = room._lock_of(store.uri, "publish")
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    lock.symlink_to(victim)
    if folder == "open to others":
        lock.parent.chmod(0o777)
    with pytest.raises(UserError), store.lock("publish", who="a run"):
        pytest.fail("the lock was taken")
    assert victim.read_text() == "years of work"


def write_rows(uri, run_ids):
    """The calls that insert a row if they find none."""
    store = connect(uri)
    inputs = [DatasetInput(Dataset("train", "abc", "local", "{}"), [InputTag("mlflow.data.context", "training")])]

    def find_or_create(client, name):
        return client.get_experiment_by_name(name) or client.create_experiment(name)

    for number, run_id in enumerate(run_ids):
        store.call(lambda client, run_id=run_id: client.log_inputs(run_id, datasets=inputs))
        store.call(partial(find_or_create, name=f"experiment-{number}"))
        store.call(lambda client, run_id=run_id: client.log_param(run_id, "a", "1"))
        store.call(lambda client, run_id=run_id: client.set_tag(run_id, "b", "2"))


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)
def test_rows_that_two_processes_write_at_once_are_stored_once(database):
    client = MlflowClient(database)
    experiment = client.create_experiment(f"rows-{database[:4]}")
    run_ids = [client.create_run(experiment).info.run_id for _ in range(15)]
    assert at_once(2, partial(write_rows, database, run_ids)) == [0, 0]
    for run_id in run_ids:
        run = client.get_run(run_id)
        assert [found.dataset.name for found in run.inputs.dataset_inputs] == ["train"]
        assert (run.data.params, run.data.tags["b"]) == ({"a": "1"}, "2")


KEYS = ("one", "two", "three")


def record(config, report):
    for key in KEYS:
        with open_run(config, key=key) as run:
            run.record(report)


@pytest.mark.slow
def test_two_processes_with_one_key_share_one_run(database, make_config, data_report):
    config, client = make_config(database), MlflowClient(database)
    assert at_once(2, partial(record, config, data_report)) == [0, 0]
    runs = client.search_runs([client.get_experiment_by_name(config.experiment).experiment_id])
    assert sorted(run.data.tags[KEY_TAG] for run in runs) == sorted(KEYS)
    assert [(run.info.status, len(run.inputs.dataset_inputs)) for run in runs] == [("FINISHED", 2)] * 3
