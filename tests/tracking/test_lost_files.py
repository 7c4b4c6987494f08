"""Files that others have moved or deleted, runs that others have ended, servers that fall silent: what is said, and what is not
registered."""

import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner
from mlflow import MlflowClient
from mlflow.cli import gc
from mlflow.exceptions import INVALID_PARAMETER_VALUE, MlflowException

from flows.model_names import fetch_model
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.models import check_champion, current_champion, fetch_version
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.registry import find_version, lineage_of, rollback
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.store import open_store
from schemas.errors import EndedByOthers, ModelError, StoreAwayError, TrackingError

from .conftest import verdict


def offered(run, proof, evaluation, *, log=log_model, **options):
    """Publish a model that is better than the base; nobody asks it."""
    tests = [verdict("base", True)]
    return publish(run, proof, tests=tests, evaluation=evaluation, log=log, prove=lambda _: None, **{"champion": None} | options)


@pytest.mark.slow
def test_a_version_without_files_is_never_registered(database, publish_one, tmp_path):
    config = publish_one(database, "1")
    shutil.move(tmp_path / "mlruns", tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="not where MLflow has left it"):
        fetch_version(find_version(f"{config.registered_model}/1", config.tracking), config.tracking, tmp_path / "lost")
    # The same run again: neither the version nor the logged model of the first time has files.
    publish_one(database, "1", config=config)
    again = find_version(f"{config.registered_model}/2", config.tracking)
    assert (fetch_version(again, config.tracking, tmp_path / "mine") / "model.safetensors").is_file()
    publish_one(database, "1", config=config)
    assert len(MlflowClient(database).search_model_versions(f"name = '{config.registered_model}'")) == 2


def test_artifacts_that_a_moved_project_has_left_behind_are_said(database, make_config, tmp_path, monkeypatch):
    # A name of its own: MLflow keeps one store for each address, and a relative one means the folder of its first use.
    config = make_config("sqlite:///left.db")
    with open_run(config, key="here") as run:
        assert run.said_about_files() == ""
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(tmp_path / "left.db", moved)
    monkeypatch.chdir(moved)
    with open_run(config, key="there") as run:
        assert f"in {tmp_path}/mlruns" in run.said_about_files()


@pytest.mark.slow
def test_a_champion_without_its_run_is_named_and_runs_continue(database, publish_one, make_config, make_merge, make_evaluation):
    config = publish_one(database, "1")
    name, run_id = config.registered_model, current_champion(open_store(config.tracking), config.registered_model).run_id
    MlflowClient(database).delete_run(run_id)
    collected = CliRunner().invoke(gc, ["--backend-store-uri", database, "--run-ids", run_id])
    assert collected.exit_code == 0, collected.output
    with pytest.raises(ModelError, match=f"the champion of {name}, version 1") as refused:
        check_champion(name, config.tracking)
    assert "--no-champion" in refused.value.fix
    assert f"grpo rollback {name} --to VERSION" in refused.value.fix
    with pytest.raises(ModelError, match="was deleted from MLflow"):
        lineage_of(f"{name}/1", config.tracking)
    alone = make_config(database, promotion={"against_champion": False})
    for letter in ("2", "3"):
        champion = current_champion(open_store(config.tracking), name)
        with open_run(alone, key=letter) as run:
            decision = offered(run, make_merge(letter), make_evaluation("merged"), champion=champion)
        assert decision.champion
        assert f"not compared with the champion, version {champion.version}" in decision.reason
    # The alias can be moved to it, and away.
    assert rollback(name, to="1", reason="", tracking=config.tracking) == ("3", "1")
    assert rollback(name, to="2", reason="", tracking=config.tracking) == ("1", "2")
    check_champion(name, config.tracking)


def test_a_name_without_a_champion_never_reaches_the_hub(database, publish_one, tmp_path, monkeypatch):
    config = publish_one(database, "1")
    client = MlflowClient(database)

    def no_network(*_):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    client.delete_registered_model_alias(config.registered_model, "champion")
    for numbers in ("1", "none"):
        with pytest.raises(ModelError, match=f"{config.registered_model} has no champion") as refused:
            fetch_model(config.registered_model, tmp_path / "copy", config.tracking)
        assert f"versions of {config.registered_model}: {numbers}; aliases: none" in refused.value.fix
        if numbers == "1":
            client.delete_model_version(config.registered_model, "1")


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "versions"), [(1, 0), (2, 1)])
def test_a_run_ended_by_others_while_publishing_moves_no_alias(
    database, make_config, make_merge, make_evaluation, asked, versions
):
    config, client, questions = make_config(database), MlflowClient(database), []

    def require_wanted():
        questions.append("?")
        if len(questions) == asked:
            raise EndedByOthers("set to Failed", None, failed=True)

    with pytest.raises(EndedByOthers), open_run(config, key="run") as run:
        offered(run, make_merge(), make_evaluation("merged"), require_wanted=require_wanted)
    assert len(client.search_model_versions(f"name = '{config.registered_model}'")) == versions
    assert current_champion(open_store(config.tracking), config.registered_model) is None
    assert client.get_run(run.run_id).info.status == "FAILED"


def test_a_run_that_was_deleted_in_mlflow_is_said_and_registers_nothing(database, make_config, make_merge, make_evaluation):
    config, client = make_config(database), MlflowClient(database)

    def log_and_delete(spec):
        log_model(spec)
        client.delete_run(spec.run_id)

    with pytest.raises(TrackingError, match="was deleted in MLflow") as refused, open_run(config, key="run") as run:
        offered(run, make_merge(), make_evaluation("merged"), log=log_and_delete)
    assert f"mlflow runs restore --run-id {run.run_id}" in refused.value.fix
    assert client.search_model_versions(f"name = '{config.registered_model}'") == []


class _Ill(BaseHTTPRequestHandler):
    """Answers 500; or, once it is told to, nothing."""

    silent = threading.Event()

    def do_GET(self):
        if self.silent.is_set():
            time.sleep(60)
        text = b'{"error_code": "INTERNAL_ERROR", "message": "it cannot"}'
        self.send_response(500)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def ill():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Ill)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    _Ill.silent.clear()
    server.shutdown()


def seconds_until_away(work):
    began = time.monotonic()
    with pytest.raises(StoreAwayError):
        work()
    return time.monotonic() - began


def test_a_process_of_a_run_is_as_patient_as_it(ill, make_config):
    tracking = make_config(ill).tracking.model_copy(update={"patience_s": 0.5})
    assert seconds_until_away(lambda: open_store(tracking, known=True).ask(lambda client: client.search_experiments())) < 4
    fault = MlflowException("two files failed:\n\n##### File a #####\nNo such artifact: 'a'", error_code=INVALID_PARAMETER_VALUE)
    assert open_store(tracking).error(fault).message == "two files failed:\n##### File a #####\nNo such artifact: 'a'"


def test_an_interrupted_run_does_not_wait_for_a_silent_server(ill, make_config):
    store = open_store(make_config(ill).tracking, known=True)
    _Ill.silent.set()

    def interrupted():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            store.ask(lambda client: client.search_experiments())

    assert seconds_until_away(interrupted) < 6
