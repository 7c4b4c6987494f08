"""Six ways in which a server ends a run, at five moments: it stops, publishes nothing, and Prefect and MLflow say the same.

Signals and `prefect flow-run cancel` are in test_ends.py.
"""

import signal
import threading
import time
from urllib.error import HTTPError
from uuid import UUID

import pytest
import yaml
from mlflow import MlflowClient
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import ends
from schemas.errors import EndedByOthers
from tests.flows.place import SMALL, Place, ask, end_group, started_mlflow, wait_for_step
from tests.flows.test_servers_away import Between
from tests.ports import free_ports

STOPPED_S = 45.0
"""Longest time between an end and the last sign of the run: its next look at Prefect, and what it has to release."""


def set_state(api, run, kind, name=None):
    return ask(f"{api}/flow_runs/{run}/set_state", {"state": {"type": kind, "name": name or kind.title()}, "force": True})


ENDS = {
    "cancelled": (lambda run: set_state(run.api, run.flow_run, "CANCELLED"), "CANCELLED", "KILLED"),
    "failed": (lambda run: set_state(run.api, run.flow_run, "FAILED"), "FAILED", "FAILED"),
    "crashed": (lambda run: set_state(run.api, run.flow_run, "CRASHED"), "CRASHED", "KILLED"),
    "completed": (lambda run: set_state(run.api, run.flow_run, "COMPLETED"), "CANCELLED", "KILLED"),
    "deleted": (lambda run: run.delete(), None, "KILLED"),
    "deleted in MLflow": (lambda run: run.delete_tracked(), "FAILED", None),
}
"""How a run is ended; what Prefect and MLflow say afterwards, or None where the run is gone."""
MOMENTS = {
    "preparing": "data/sources.json",
    "training": "",
    "merging": "merge/proof.json",
    "evaluating": "evaluation/merged/report.md",
    "publishing": "model.safetensors",
}
"""A moment, and the end of the address of the upload that holds the run there. The stage is long: nothing has to hold it."""


class Holding(Between):
    """Lets one kind of upload wait."""

    def __init__(self, address):
        super().__init__(address)
        self.wanted, self.held, self.released = "", threading.Event(), threading.Event()

    def pass_on(self, hand):
        if self.wanted and hand.command == "PUT" and hand.path.endswith(self.wanted):
            self.held.set()
            self.released.wait(STOPPED_S)


class Run:
    def __init__(self, place, between, moment, case):
        self.place, self.api, self.between = place, place.api, between
        self.experiment = f"{moment}-{case}".replace(" ", "-")
        between.wanted = MOMENTS[moment]
        between.held.clear()
        between.released.clear()
        changed = ["--set", f"tracking.experiment={self.experiment}", "--set", f"tracking.registered_model={self.experiment}"]
        if moment == "training":
            changed += ["--set", "stages.0.max_steps=100000"]
        done = self._updates()
        self.process = place.start("run", "small.yaml", *changed)
        if moment == "training":
            wait_for_step("runs/small/train_stage/*/metrics.jsonl", place.root, done + 3, self.process)
        else:
            assert between.held.wait(300), self.process.communicate()[0]
        [self.flow_run] = [path.stem for path in place.root.glob("runs/small/.running/*.json")]

    def _updates(self):
        return max(len(path.read_text().splitlines()) for path in self.place.root.glob("runs/small/train_stage/*/metrics.jsonl"))

    @property
    def client(self):
        return MlflowClient(self.between.address)

    def tracked(self):
        found = self.client.get_experiment_by_name(self.experiment)
        return self.client.search_runs([found.experiment_id])

    def delete(self):
        """Delete the flow run; a server whose database is busy answers 503."""
        for _ in range(20):
            try:
                ask(f"{self.api}/flow_runs/{self.flow_run}", method="DELETE")
                return
            except HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(0.5)

    def delete_tracked(self):
        for run in self.tracked():
            self.client.delete_run(run.info.run_id)
        self.between.released.set()

    def state(self):
        found = ask(f"{self.api}/flow_runs/filter", {"flow_runs": {"id": {"any_": [self.flow_run]}}})
        return found[0]["state_type"] if found else None


CASES = [*(("training", case) for case in ENDS), *((moment, "cancelled") for moment in MOMENTS if moment != "training")]
"""Every end at one moment, and one end at every moment."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, prefect_api):
    """A folder with a finished run, so that the next one comes to any moment in seconds; uploads go through a `Holding`."""
    root, [port] = tmp_path_factory.mktemp("others"), free_ports(1)
    place, server = Place(root, prefect_api), started_mlflow(root, port)
    place.between = Holding(f"http://127.0.0.1:{port}")
    try:
        place.write("small.yaml", yaml.safe_dump(SMALL | {"tracking": {"tracking_uri": place.between.own}}))
        place.grpo("run", "small.yaml")
        yield place
    finally:
        place.between.shutdown()
        end_group(server)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("others")
@pytest.mark.parametrize(("moment", "case"), CASES)
def test_a_run_that_others_end_stops_and_publishes_nothing(place, moment, case):
    end, in_prefect, in_mlflow = ENDS[case]
    run = Run(place, place.between, moment, case)
    try:
        end(run)
        output, _ = run.process.communicate(timeout=STOPPED_S)
    finally:
        place.between.released.set()
        run.process.kill()
    tracked = run.tracked()
    assert run.process.returncode not in (0, -signal.SIGKILL), output[-1000:]
    assert "Traceback" not in output
    assert not run.client.search_model_versions(f"name='{run.experiment}'")
    assert run.state() == in_prefect
    parents = [found.info.status for found in tracked if "mlflow.parentRunId" not in found.data.tags]
    assert parents == ([in_mlflow] if in_mlflow else [])
    assert all(found.info.status != "RUNNING" for found in tracked)


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
