"""Every update of the journal arrives exactly once, whatever is interrupted."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.handle import MAX_METRICS, RunHandle
from grpo_tasks.tracking.journal import JournalShipper
from grpo_tasks.tracking.store import open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import TrackingError, TrainingError

from .conftest import STARTED_MS, history, write_journal


@pytest.fixture
def child(any_store, request):
    """A new run in the store under test."""
    store = open_store(TrackingConfig(tracking_uri=any_store))
    name = request.node.name
    found = store.client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else store.client.create_experiment(name)
    return RunHandle(store, store.client.create_run(experiment))


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "stage").mkdir()
    return StageDir(tmp_path / "stage")


def shipper_of(child, stage):
    return JournalShipper(child.store, stage.root, lambda: child)


def steps_of(child, metric="reward"):
    return [step for step, _, _ in history(child.store.client, child.run_id, metric)]


@pytest.mark.slow
def test_identical_metrics_sent_twice_are_stored_once(child):
    metrics = [Metric("reward", 0.1 * step, STARTED_MS + step, step) for step in range(1, 30)]
    for _ in range(2):
        child.store.client.log_batch(child.run_id, metrics=metrics)
    child.store.client.log_batch(child.run_id, metrics=[*metrics, Metric("reward", 9.0, STARTED_MS + 30, 30)])
    assert steps_of(child) == list(range(1, 31))


def test_a_journal_is_shipped_as_it_grows_with_its_own_times(child, stage):
    shipper = shipper_of(child, stage)
    assert shipper.ship(), "no journal yet is nothing to send"
    write_journal(stage.journal, range(1, 4))
    assert shipper.ship()
    write_journal(stage.journal, range(4, 130))
    assert shipper.ship()
    lines = map(json.loads, stage.journal.read_text().splitlines())
    expected = [(line["step"], line["metrics"]["reward"], line["timestamp_ms"]) for line in lines]
    assert history(child.store.client, child.run_id, "reward") == expected
    assert steps_of(child, "rewards/format/mean") == list(range(1, 130))


def test_an_incomplete_line_is_sent_once_it_is_complete(child, stage):
    shipper = shipper_of(child, stage)
    write_journal(stage.journal, [1, 2])
    whole = stage.journal.read_bytes()
    stage.journal.write_bytes(whole[:-20])
    assert shipper.ship()
    assert steps_of(child) == [1]
    stage.journal.write_bytes(whole)
    assert shipper.ship()
    assert steps_of(child) == [1, 2]


def test_a_new_shipper_continues_after_the_last_step_in_the_store(child, stage):
    write_journal(stage.journal, range(1, 21))
    assert shipper_of(child, stage).ship()
    write_journal(stage.journal, range(21, 31))
    assert shipper_of(child, stage).ship()
    assert steps_of(child) == list(range(1, 31))


def test_a_stage_trained_again_with_new_timestamps_has_no_step_twice(child, stage):
    write_journal(stage.journal, range(1, 21))
    assert shipper_of(child, stage).ship()
    stage.journal.unlink()
    write_journal(stage.journal, range(1, 31), started_ms=STARTED_MS + 3_600_000)
    assert shipper_of(child, stage).ship()
    assert steps_of(child) == list(range(1, 31))


def test_a_journal_that_was_replaced_is_read_from_its_start(child, stage):
    shipper = shipper_of(child, stage)
    write_journal(stage.journal, range(1, 11))
    assert shipper.ship()
    stage.journal.unlink()
    write_journal(stage.journal, range(1, 3), started_ms=STARTED_MS + 1)
    assert shipper.ship()
    write_journal(stage.journal, range(3, 14), started_ms=STARTED_MS + 1)
    assert shipper.ship()
    assert steps_of(child) == list(range(1, 14))


def test_final_figures_are_not_mistaken_for_journal_steps(child, stage):
    child.metrics({"final/reward": 1.0}, timestamp_ms=STARTED_MS, step=40)
    write_journal(stage.journal, range(1, 41))
    assert shipper_of(child, stage).ship()
    assert steps_of(child) == list(range(1, 41))


SHIP = """
import sys, time
from pathlib import Path
from grpo_tasks.tracking import journal
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.store import open_store
from schemas.config.operations import TrackingConfig
uri, run_id, stage = sys.argv[1:]
journal.MAX_METRICS = 50
store = open_store(TrackingConfig(tracking_uri=uri))
handle = RunHandle(store, store.client.get_run(run_id))
journal.JournalShipper(store, Path(stage), lambda: handle).ship()
"""


@pytest.mark.long
@pytest.mark.ci
def test_killed_in_the_middle_and_shipped_again_has_no_step_twice(child, stage):
    write_journal(stage.journal, range(1, 1_001))
    command = [sys.executable, "-c", SHIP, child.store.uri, child.run_id, str(stage.root)]
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[2], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not steps_of(child):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    before = len(steps_of(child))
    assert 0 < before < 1_000, "the kill should come in the middle"
    # The trainer was killed too. It repeats the updates after its last checkpoint, with new timestamps.
    stage.journal.unlink()
    write_journal(stage.journal, range(1, 1_001), started_ms=STARTED_MS + 60_000)
    assert shipper_of(child, stage).ship()
    for metric in ("reward", "kl", "tokens_per_s"):
        assert steps_of(child, metric) == list(range(1, 1_001))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def dead_store():
    return open_store(TrackingConfig(tracking_uri=f"http://127.0.0.1:{free_port()}"))


def test_a_dead_server_costs_only_delay(child, stage, dead_store):
    write_journal(stage.journal, range(1, 11))
    shipper = JournalShipper(dead_store, stage.root, lambda: RunHandle(dead_store, child.store.client.get_run(child.run_id)))
    began = time.monotonic()
    assert not shipper.ship()
    assert not shipper.ship()
    assert time.monotonic() - began < 20
    # The server is back: the same shipper sends the lines that have accumulated.
    shipper.store, shipper._run = child.store, child
    write_journal(stage.journal, range(11, 21))
    assert shipper.ship()
    assert steps_of(child) == list(range(1, 21))


@pytest.mark.long
def test_a_child_run_that_cannot_be_created_does_not_stop_training(stage, dead_store):
    write_journal(stage.journal, [1])
    shipper = JournalShipper(dead_store, stage.root, lambda: dead_store.ask(lambda client: client.get_run("0" * 32)))
    assert not shipper.ship()
    with pytest.raises(TrackingError, match="1 lines of the journal") as caught:
        shipper.finish(timeout_s=0.1)
    assert dead_store.uri in str(caught.value)
    assert "not trained again" in caught.value.fix


def test_a_refusal_by_the_server_is_an_error_not_a_delay(child, stage):
    store = child.store
    store.client.delete_run(child.run_id)
    write_journal(stage.journal, [1])
    with pytest.raises(TrackingError, match="deleted") as caught:
        shipper_of(child, stage).ship()
    assert store.uri in str(caught.value)


def test_a_damaged_line_is_named(child, stage):
    write_journal(stage.journal, [1])
    with stage.journal.open("a") as file:
        file.write('{"step": 2, "metr\n')
    with pytest.raises(TrainingError, match="damaged") as caught:
        shipper_of(child, stage).ship()
    assert caught.value.place == f"{stage.journal}:2"


def test_no_call_exceeds_mlflows_limit_and_no_step_is_split(child, stage, monkeypatch):
    calls, send = [], child.store.client.log_batch
    monkeypatch.setattr(child.store.client, "log_batch", lambda run_id, metrics: (calls.append(metrics), send(run_id, metrics)))
    write_journal(stage.journal, range(1, 200))
    assert shipper_of(child, stage).ship()
    assert steps_of(child) == list(range(1, 200))
    assert max(map(len, calls)) <= MAX_METRICS
    steps = [{metric.step for metric in metrics} for metrics in calls]
    assert sum(map(len, steps)) == 199
    assert len(calls) == -(-199 // (MAX_METRICS // 11))


def test_the_uri_in_the_environment_is_the_default(monkeypatch, tmp_path):
    from grpo_tasks.tracking.store import resolve_uri

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_uri(TrackingConfig()) == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert resolve_uri(TrackingConfig()) == "http://127.0.0.1:5000"
    assert resolve_uri(TrackingConfig(tracking_uri="sqlite:///x.db")) == "sqlite:///x.db"


def test_an_impossible_store_is_refused_at_once_with_uri_and_fix():
    uri = "sqlite:////proc/nothing/mlflow.db"
    began = time.monotonic()
    with pytest.raises(TrackingError, match="cannot be opened") as caught:
        open_store(TrackingConfig(tracking_uri=uri)).ask(lambda client: client.search_experiments())
    assert caught.value.place == uri
    assert caught.value.fix
    assert time.monotonic() - began < 5


def test_an_unreachable_server_is_an_error_with_uri_and_fix(dead_store):
    with pytest.raises(TrackingError) as caught:
        dead_store.ask(lambda client: client.search_experiments())
    assert caught.value.place == dead_store.uri
    assert "it resumes" in caught.value.fix


def test_calls_do_not_change_mlflows_globals_for_good(database, monkeypatch):
    import mlflow

    before = mlflow.get_tracking_uri()
    with open_store(TrackingConfig(tracking_uri=database)).as_default():
        assert mlflow.get_tracking_uri() == database
    assert mlflow.get_tracking_uri() == before
    assert "MLFLOW_TRACKING_URI" not in os.environ
    assert isinstance(open_store(TrackingConfig(tracking_uri=database)).client, MlflowClient)
