"""Names that the registry takes, what is said of a server that answers badly, and where the locks of a server's store are."""

import string
import tempfile
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.utils.models import _parse_model_uri
from pydantic import TypeAdapter, ValidationError

from grpo_tasks.tracking import store as room
from grpo_tasks.tracking.past_runs import registered_versions
from grpo_tasks.tracking.registry import find_version
from grpo_tasks.tracking.store import check_store, connect
from schemas.config.operations import TrackingConfig
from schemas.config.types import MlflowName
from schemas.errors import ModelError, TrackingError, UserError
from tests.answering import answering
from tests.ports import free_ports


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


@pytest.mark.parametrize("name", ["it's", "a\\"])
def test_a_name_that_another_program_registered_hides_no_other_model(database, name):
    client, tracking = MlflowClient(database), TrackingConfig(tracking_uri=database)
    for one in (name, "plain"):
        client.create_registered_model(one)
        client.create_model_version(one, "file:///nowhere")
    assert {line.name for line in registered_versions(tracking)} == {name, "plain"}
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


def test_a_store_that_answers_is_counted(any_store):
    assert check_store(TrackingConfig(tracking_uri=any_store)) >= 1


def test_a_database_server_that_is_away_is_reported_at_once(monkeypatch):
    """MLflow itself would try for two minutes."""
    monkeypatch.setattr(room, "CHECK_S", 0.0)
    monkeypatch.setattr("mlflow.store.db.utils.time", SimpleNamespace(sleep=lambda _: pytest.fail("MLflow tries again")))
    [port] = free_ports(1)
    with pytest.raises(TrackingError, match=r"Connection refused|not installed"):
        connect(f"postgresql://127.0.0.1:{port}/mlflow")


@pytest.mark.parametrize("folder", ["open to others", "private"])
def test_a_link_in_the_temporary_folder_empties_no_file(server, tmp_path, monkeypatch, folder):
    """Another user knows the name of a lock, and makes a link of that name to a file that only its victim can write to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = connect(server)
    lock = room._lock_of(store.uri, "publish")
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    lock.symlink_to(victim)
    if folder == "open to others":
        lock.parent.chmod(0o777)
    with pytest.raises(UserError), store.lock("publish", who="a run"):
        pytest.fail("the lock was taken")
    assert victim.read_text() == "years of work"
