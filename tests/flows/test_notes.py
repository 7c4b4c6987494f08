"""Which runs a record in a shared folder declares dead."""

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from flows.ends import ProcessRecord, recorded_process
from grpo_tasks.processes.lifetime import ProcessIdentity
from tests.flows.place import prefect_server


@flow
def retried():
    """A run whose process was killed, and which a person retries."""


@pytest.fixture
def ended():
    """The note of a process of this machine that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    process.communicate()
    return ProcessRecord(identity.pid, identity.born)


def test_a_process_of_this_machine_is_dead_when_it_has_ended(ended):
    assert ended.has_ended()
    assert not ProcessRecord.of().has_ended()
    # As an earlier version has recorded it.
    assert ProcessRecord(pid=ended.pid, born=ended.born).host == socket.gethostname()


def test_a_run_in_another_container_is_left_alone(ended, tmp_path):
    elsewhere = replace(ended, host="another-container")
    assert not elsewhere.has_ended()
    note = tmp_path / "7ab5a1cf-5f6b-4e0a-9c5d-0d3a5f3d3a55.json"
    note.write_text(json.dumps(asdict(elsewhere)))
    with recorded_process(tmp_path, "0f0f0f0f-5f6b-4e0a-9c5d-0d3a5f3d3a55"):
        assert len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == [note.name]


@pytest.mark.long
def test_a_run_that_is_retried_does_not_take_itself_for_dead(ended, tmp_path):
    with (
        prefect_server(tmp_path) as api,
        temporary_settings({PREFECT_API_URL: api}),
        get_client(sync_client=True) as client,
    ):
        run = client.create_flow_run(retried, state=Running())
        notes = tmp_path / "notes"
        notes.mkdir()
        note = notes / f"{run.id}.json"
        note.write_text(json.dumps(asdict(ended)))
        with recorded_process(notes, str(run.id)):
            assert client.read_flow_run(run.id).state.is_running()
            assert ProcessRecord(**json.loads(note.read_text())) == ProcessRecord.of()
    assert not note.exists()


def test_a_requeued_slurm_job_ran_on_a_lost_node(ended, monkeypatch):
    earlier = replace(ended, host="another-node", job="17")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert earlier.has_ended()
    assert not replace(earlier, start=1).has_ended(), "another node of the same start"
    assert not replace(earlier, job="18").has_ended()
