"""Every update of the journal arrives exactly once, whatever is interrupted; the machine is measured meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.entities import Metric

from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking import store as room
from grpo_tasks.tracking.handle import MAX_METRICS, RunHandle
from grpo_tasks.tracking.journal import JournalShipper, Machine
from grpo_tasks.tracking.store import open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import TrackingError, TrainingError

from .conftest import STARTED_MS, history, write_journal


@pytest.fixture
def child(database, request):
    """A new run in the store under test."""
    store = open_store(TrackingConfig(tracking_uri=database))
    return RunHandle(store, store.client.create_run(store.client.create_experiment(request.node.name)))


on_both_stores = pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)


@pytest.fixture
def stage(tmp_path):
    (tmp_path / "stage").mkdir()
    return StageDir(tmp_path / "stage")


def shipper_of(child, stage):
    return JournalShipper(child.store, stage.root, lambda: child, machine=Machine(every_s=3_600.0))


def steps_of(child, metric="reward"):
    return [step for step, _, _ in history(child.store.client, child.run_id, metric)]


@pytest.mark.slow
@on_both_stores
def test_identical_metrics_sent_twice_are_stored_once(child):
    metrics = [Metric("reward", 0.1 * step, STARTED_MS + step, step) for step in range(1, 30)]
    for _ in range(2):
        child.store.client.log_batch(child.run_id, metrics=metrics)
    child.store.client.log_batch(child.run_id, metrics=[*metrics, Metric("reward", 9.0, STARTED_MS + 30, 30)])
    assert steps_of(child) == list(range(1, 31))


@on_both_stores
def test_a_journal_is_shipped_as_it_grows_with_its_own_times(child, stage):
    shipper = shipper_of(child, stage)
    assert shipper.ship(), "no journal yet is nothing to send"
    write_journal(stage.journal, range(1, 4))
    whole = stage.journal.read_bytes()
    stage.journal.write_bytes(whole[:-20])
    assert shipper.ship()
    assert steps_of(child) == [1, 2], "an incomplete line is sent once it is complete"
    stage.journal.write_bytes(whole)
    write_journal(stage.journal, range(4, 130))
    # Figures of the finished stage are not mistaken for steps.
    child.metrics({"final/reward": 1.0}, timestamp_ms=STARTED_MS, step=140)
    assert shipper.ship()
    lines = map(json.loads, stage.journal.read_text().splitlines())
    expected = [(line["step"], line["metrics"]["reward"], line["timestamp_ms"]) for line in lines]
    assert history(child.store.client, child.run_id, "reward") == expected
    assert steps_of(child, "rewards/format/mean") == list(range(1, 130))
    # A new shipper continues after the last step in the store.
    write_journal(stage.journal, range(130, 135))
    assert shipper_of(child, stage).ship()
    assert steps_of(child) == list(range(1, 135))


@pytest.mark.parametrize("new_shipper", [True, False])
def test_a_journal_that_was_replaced_has_no_step_twice(child, stage, new_shipper):
    shipper = shipper_of(child, stage)
    write_journal(stage.journal, range(1, 11))
    assert shipper.ship()
    stage.journal.unlink()
    write_journal(stage.journal, range(1, 3), started_ms=STARTED_MS + 3_600_000)
    shipper = shipper_of(child, stage) if new_shipper else shipper
    assert shipper.ship()
    write_journal(stage.journal, range(3, 14), started_ms=STARTED_MS + 3_600_000)
    assert shipper.ship()
    assert steps_of(child) == list(range(1, 14))


SHIP = """
import sys
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
@pytest.mark.parametrize("database", ["sqlite", pytest.param("server", marks=pytest.mark.ci)], indirect=True)
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
    assert 0 < len(steps_of(child)) < 1_000, "the kill should come in the middle"
    # The trainer was killed too. It repeats the updates after its last checkpoint, with new timestamps.
    stage.journal.unlink()
    write_journal(stage.journal, range(1, 1_001), started_ms=STARTED_MS + 60_000)
    assert shipper_of(child, stage).ship()
    for metric in ("reward", "kl", "tokens_per_s"):
        assert steps_of(child, metric) == list(range(1, 1_001))


def test_a_dead_server_costs_only_delay(child, stage, monkeypatch):
    monkeypatch.setattr(room, "FIRST_S", 0.1)
    dead = open_store(TrackingConfig(tracking_uri="http://127.0.0.1:1"))
    write_journal(stage.journal, range(1, 11))
    # The child run cannot be created either.
    shipper = JournalShipper(dead, stage.root, lambda: dead.call(lambda client: client.get_run("0" * 32)))
    began = time.monotonic()
    assert not shipper.ship()
    assert time.monotonic() - began < 10
    with pytest.raises(TrackingError, match="10 lines of the journal") as caught:
        shipper.finish(timeout_s=0.1)
    assert dead.uri in str(caught.value)
    assert "not trained again" in caught.value.fix
    # The server is back: the same shipper sends the lines that have accumulated.
    shipper.store, shipper.open_child = child.store, lambda: child
    write_journal(stage.journal, range(11, 21))
    assert shipper.ship()
    assert steps_of(child) == list(range(1, 21))


@on_both_stores
def test_a_refusal_by_the_server_is_an_error_not_a_delay(child, stage):
    child.store.client.delete_run(child.run_id)
    write_journal(stage.journal, [1])
    with pytest.raises(TrackingError, match="deleted") as caught:
        shipper_of(child, stage).ship()
    assert child.store.uri in str(caught.value)


def test_a_line_damaged_after_others_were_sent_is_named(child, stage):
    shipper = shipper_of(child, stage)
    write_journal(stage.journal, [1])
    assert shipper.ship()
    with stage.journal.open("a") as file:
        file.write('{"step": 2, "metr\n')
    with pytest.raises(TrainingError, match="damaged") as caught:
        shipper.ship()
    assert caught.value.place == f"{stage.journal}:2"


def test_no_call_exceeds_mlflows_limit_and_no_step_is_split(child, stage, monkeypatch):
    calls, send = [], child.store.client.log_batch
    monkeypatch.setattr(child.store.client, "log_batch", lambda run_id, metrics: (calls.append(metrics), send(run_id, metrics)))
    write_journal(stage.journal, range(1, 200))
    assert shipper_of(child, stage).ship()
    assert max(map(len, calls)) <= MAX_METRICS
    steps = [{metric.step for metric in metrics} for metrics in calls]
    assert sum(map(len, steps)) == 199
    assert len(calls) == -(-199 // (MAX_METRICS // 11))


def test_the_machine_is_measured_apart_from_the_curves(child, stage):
    shipper = shipper_of(child, stage)
    write_journal(stage.journal, range(1, 4))
    assert shipper.ship()
    metrics = child.store.client.get_run(child.run_id).data.metrics
    assert not any(name.startswith("system/") for name in metrics), "the next sample is due in an hour"
    shipper.machine = Machine(every_s=0.0)
    write_journal(stage.journal, [4])
    assert shipper.ship()
    metrics = child.store.client.get_run(child.run_id).data.metrics
    assert 0 <= metrics["system/cpu_utilization_percentage"] <= 100
    assert metrics["system/system_memory_usage_megabytes"] > 0
    assert "system/disk_available_megabytes" in metrics
    # A new process finds its position in the journal, not in the samples of the machine.
    write_journal(stage.journal, [5])
    assert shipper_of(child, stage).ship()
    assert steps_of(child) == [1, 2, 3, 4, 5]
