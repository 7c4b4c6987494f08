"""Runs that others end: they stop and publish nothing; see ended_by_others.py."""

import signal
import threading
import time
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import ends
from schemas.errors import EndedByOthers
from tests.flows.ended_by_others import ENDS, MOMENTS, Run, ended, prepared, set_state
from tests.flows.place import ask

CASES = [*(("training", case) for case in ENDS), *((moment, "cancelled") for moment in MOMENTS if moment != "training")]
"""Every end at one moment, and one end at every moment; the module prints all."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, prefect_api):
    with prepared(tmp_path_factory.mktemp("others"), prefect_api) as place:
        yield place


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("others")
@pytest.mark.parametrize(("moment", "case"), CASES)
def test_a_run_that_others_end_stops_and_publishes_nothing(place, moment, case):
    assert ended(place, moment, case).faults == []


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("others")
def test_ctrl_c_while_mlflow_hangs_ends_within_ten_seconds(place):
    run = Run(place, place.between, "training", "hanging")
    place.between.mode = "hanging"
    try:
        time.sleep(3)
        began = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        lines = iter(run.process.stdout.readline, "")
        assert any("stopping; what is finished stays" in line for line in lines)
        assert time.monotonic() - began < 1
        run.process.communicate(timeout=60)
        assert time.monotonic() - began < 10
    finally:
        place.between.mode = "well"
        run.process.kill()


@flow
def _nothing():
    pass


@pytest.mark.parametrize("kind", ["CANCELLED", "CANCELLING", "FAILED", "COMPLETED", "DELETED", "SUSPENDED"])
def test_whoever_ends_a_run_in_prefect_interrupts_it_and_stops_its_publication(prefect_api, monkeypatch, kind):
    monkeypatch.setattr(ends, "POLL_S", 0.1)
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        run = client.create_flow_run(_nothing).id
        set_state(prefect_api, run, "RUNNING")

        def end():
            if kind == "DELETED":
                client.delete_flow_run(UUID(str(run)))
            elif kind == "SUSPENDED":
                state = {"type": "PAUSED", "name": "Suspended", "state_details": {"pause_reschedule": True}}
                ask(f"{prefect_api}/flow_runs/{run}/set_state", {"state": state, "force": True})
            else:
                set_state(prefect_api, run, kind)

        def work():
            with ends.watched(str(run)):
                ends.require_wanted(str(run))
                end()
                time.sleep(20)

        with pytest.raises(EndedByOthers) as ended:
            work()
        assert ended.value.failed is (kind == "FAILED")
        with pytest.raises(EndedByOthers):
            ends.require_wanted(str(run))
        if kind != "DELETED":
            left = {"CANCELLING": "CANCELLED", "COMPLETED": "CANCELLED", "SUSPENDED": "PAUSED"}.get(kind, kind)
            assert client.read_flow_run(run).state.type.value == left


@pytest.mark.slow
def test_a_paused_run_waits_before_it_publishes_until_it_is_resumed(prefect_api, monkeypatch):
    monkeypatch.setattr(ends, "POLL_S", 0.1)
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as client:
        run = client.create_flow_run(_nothing).id
        set_state(prefect_api, run, "PAUSED")
        threading.Timer(1.0, client.resume_flow_run, [run]).start()
        began = time.monotonic()
        with ends.watched(str(run)):
            ends.require_wanted(str(run))
        assert time.monotonic() - began > 0.9
