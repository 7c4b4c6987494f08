"""The automations that `grpo up` creates, on a real Prefect server: what they notify of, pause and mark as crashed."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Failed, Running

from flows.deployments import FILE
from grpo_tasks.operating.automations import NOTIFY, SUSPENDED, create_automations
from tests.flows.place import ask, prefect_server
from tests.processes.waiting import until

pytestmark = [pytest.mark.xdist_group("automations"), pytest.mark.long, pytest.mark.timeout(600)]

VANISHES = """
import os, signal
from prefect import flow

@flow(name="grpo-pipeline", flow_run_name="vanishes", persist_result=False)
def vanishes():
    import time
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)

vanishes()
"""


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with prefect_server(tmp_path_factory.mktemp("prefect")) as api, temporary_settings({PREFECT_API_URL: api}):
        # A process has one sender of events, and one that an earlier test made would send to that test's server.
        EventsWorker.drain_all(timeout=30)
        yield api
        EventsWorker.drain_all(timeout=30)


@pytest.fixture
def received():
    """Bodies that a notification block posts to a receiver on this machine, and the receiver's address."""
    bodies = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield bodies, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def create():
    with get_client(sync_client=True) as client:
        return create_automations(client)


def automation(api, name):
    [found] = ask(f"{api}/automations/filter", {"automations": {"name": {"any_": [name]}}})
    return found


def made_quick(api, name="grpo: a run has vanished"):
    """Ten minutes of silence are too long for a test."""
    found = automation(api, name)
    kept = {key: found[key] for key in ("name", "description", "enabled", "trigger", "actions")}
    ask(f"{api}/automations/{found['id']}", kept | {"trigger": found["trigger"] | {"within": 10}}, method="PUT")


def test_creating_twice_makes_one_and_respects_what_is_off(api):
    names = create()
    vanished = automation(api, "grpo: a run has vanished")
    ask(f"{api}/automations/{vanished['id']}", {"enabled": False}, method="PATCH")
    assert create() == names
    found = ask(f"{api}/automations/filter", {"limit": 100})
    assert sorted(each["name"] for each in found) == sorted(names)
    assert [each["name"] for each in found if not each["enabled"]] == ["grpo: a run has vanished"]
    ask(f"{api}/automations/{vanished['id']}", {"enabled": True}, method="PATCH")
    assert {action["type"] for each in found for action in each["actions"]} == {
        "do-nothing", "pause-deployment", "change-flow-run-state",
    }, "nothing leaves the server without a block"  # fmt: skip


def test_a_champion_change_and_a_guard_reach_the_users_block(api, received):
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    bodies, address = received
    CustomWebhookNotificationBlock(name="w", url=address, json_data={"text": "{{subject}}: {{body}}"}).save(NOTIFY)
    create()
    emit_event("grpo.champion.changed", {"prefect.resource.id": "grpo.model.small"}, payload={"detail": "promoted v7"})
    emit_event("grpo.kl_blow_up", {"prefect.resource.id": "grpo.stage.format"}, payload={"stage": "format", "update": 4})
    until(lambda: len(bodies) >= 2)
    champion, guard = sorted((json.loads(body)["text"] for body in bodies), key=lambda text: "guard" in text)
    assert champion.startswith("grpo: the champion has changed")
    assert "detail: promoted v7" in champion
    assert "grpo.kl_blow_up: grpo.stage.format" in guard
    assert "stage: format" in guard


def test_three_failures_pause_the_schedules_of_a_deployment(api):
    create()
    # Not `ask`: the client tries again when the database is busy.
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow_from_name("grpo-retrain"), "retrain", entrypoint="x.y")

        def fail():
            run = client.create_flow_run_from_deployment(deployment)
            client.set_flow_run_state(run.id, Failed(), force=True)

        fail()
        fail()
        time.sleep(3)
        assert not client.read_deployment(deployment).paused
        fail()
        until(lambda: client.read_deployment(deployment).paused)


def test_a_run_whose_process_has_vanished_becomes_crashed(api):
    create()
    made_quick(api)
    subprocess.run([sys.executable, "-c", VANISHES], check=False, env=os.environ | {"PREFECT_API_URL": api})

    def state():
        return ask(f"{api}/flow_runs/filter", {"flow_runs": {"name": {"any_": ["vanishes"]}}})[0]["state"]

    until(lambda: state()["type"] == "CRASHED")
    assert "no sign of life" in state()["message"]


def test_a_suspended_run_stays_suspended_also_where_prefect_loses_its_own_event(api):
    create()
    made_quick(api)
    time.sleep(3)  # the server reads changed automations a moment later
    # Not `ask`: the client tries again when the database is busy.
    with get_client(sync_client=True) as client:
        # They only have states: nothing runs.
        named = flow(lambda: None, name="grpo-preset")
        rests, silent = (client.create_flow_run(named, name=name, state=Running()).id for name in ("rests", "silent"))
        related = [{"prefect.resource.id": "prefect.flow.any", "prefect.resource.role": "flow"}]
        related[0]["prefect.resource.name"] = "grpo-preset"
        for run in (rests, silent):
            emit_event("prefect.flow-run.heartbeat", {"prefect.resource.id": f"prefect.flow-run.{run}"}, related=related)
        for _ in range(5):
            time.sleep(0.5)
            emit_event(SUSPENDED, {"prefect.resource.id": f"prefect.flow-run.{rests}"}, related=related)
        until(lambda: client.read_flow_run(silent).state_type == "CRASHED")
        assert client.read_flow_run(rests).state.is_running()


def apply(folder):
    """What `grpo up` calls."""
    command = [sys.executable, "-m", "grpo_tasks.operating.deployments", str(FILE)]
    environment = os.environ | {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "GRPO_WORKDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def deployed(api):
    """What users can change about each deployment, by its name."""
    found = {}
    for each in ask(f"{api}/deployments/filter", {}):
        schedules = ask(f"{api}/deployments/{each['id']}/schedules")
        plain = [{key: one[key] for key in ("slug", "active", "schedule", "parameters")} for one in schedules]
        triggers = ask(f"{api}/automations/related-to/prefect.deployment.{each['id']}")
        found[each["name"]] = {
            "schedules": sorted(plain, key=str),
            "triggers": sorted((one["name"], one["enabled"]) for one in triggers),
            "paused": each["paused"],
            "parameters": each["parameters"],
        }
    return found


def test_deploying_again_keeps_what_users_changed_and_brings_the_rest(api, tmp_path):
    apply(tmp_path)
    new = deployed(api)
    assert [one["active"] for one in new["retrain"]["schedules"]] == [False, False]
    ids = {each["name"]: each["id"] for each in ask(f"{api}/deployments/filter", {})}
    for schedule in ask(f"{api}/deployments/{ids['retrain']}/schedules"):
        if schedule["slug"] == "nightly":
            ask(f"{api}/deployments/{ids['retrain']}/schedules/{schedule['id']}", {"active": True}, method="PATCH")
    # As the UI makes them: without a name.
    own = {"schedule": {"cron": "30 5 * * *", "timezone": "UTC"}, "active": True, "parameters": {"source": "own.yaml"}}
    for name in ("retrain", "preset"):
        ask(f"{api}/deployments/{ids[name]}/schedules", [own])
    for trigger in ask(f"{api}/automations/related-to/prefect.deployment.{ids['retrain']}"):
        ask(f"{api}/automations/{trigger['id']}", {"enabled": not trigger["enabled"]}, method="PATCH")
    ask(f"{api}/deployments/{ids['watch-data']}/pause_deployment", {})
    edited = new["retrain"]["parameters"] | {"source": "own.yaml"}
    ask(f"{api}/deployments/{ids['retrain']}", {"parameters": edited}, method="PATCH")
    ask(f"{api}/deployments/{ids['train']}", {"parameters": new["train"]["parameters"] | {"config": {}}}, method="PATCH")
    ask(f"{api}/work_pools/grpo", {"concurrency_limit": 3}, method="PATCH")
    changed = deployed(api)
    assert changed != new

    apply(tmp_path)
    again = deployed(api)
    assert again.pop("train") == new["train"], "the preset of the release"
    changed.pop("train")
    assert again == changed
    assert ask(f"{api}/work_pools/grpo")["concurrency_limit"] == 3
