"""Links from a flow run to MLflow, and the artifacts that a run shows while it runs, on a real Prefect server."""

from types import SimpleNamespace

import pytest
from prefect import flow, task
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.flow_run import FlowRun, mlflow_pages
from grpo_tasks.kit.progress import Count
from grpo_tasks.running import orchestrator
from grpo_tasks.running.progress import StepProgress
from tests.flows.place import ask
from tests.processes.waiting import until

pytestmark = pytest.mark.xdist_group("running")
UI = "http://127.0.0.1:5000"


@pytest.fixture
def server(prefect_api):
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        yield SimpleNamespace(api=prefect_api)


def shown(server, run_name):
    wanted = {"flow_runs": {"name": {"any_": [run_name]}}, "sort": "ID_DESC"}
    found = ask(f"{server.api}/artifacts/filter", wanted)
    return {artifact["key"]: artifact for artifact in found}


@pytest.mark.long
@pytest.mark.ci
def test_a_run_links_to_its_mlflow_run_its_report_and_its_version(server):
    @flow(flow_run_name="links", persist_result=False)
    def linked():
        tracked = SimpleNamespace(store=SimpleNamespace(uri=f"{UI}/"), experiment_id="7", run_id="abc")
        run = FlowRun(tracked, None, None, fresh=False, flow_run_id=None)
        run.show_links()
        run.show_links(SimpleNamespace(model_name="my model", model_version="3"), report=True)

    linked()
    text = shown(server, "links")["links"]["data"]
    assert len(ask(f"{server.api}/artifacts/filter", {"flow_runs": {"name": {"any_": ["links"]}}})) == 1
    assert f"]({UI}/#/experiments/7/runs/abc)" in text
    assert f"]({UI}/#/experiments/7/runs/abc/artifacts/report/report.html)" in text
    assert f"[my model version 3]({UI}/#/models/my%20model/versions/3)" in text


def test_links_use_the_address_for_browsers_and_no_password(monkeypatch):
    assert mlflow_pages("sqlite:///mlflow.db") == ""
    assert mlflow_pages("http://me:secret@mlflow:5000") == "http://me:***@mlflow:5000"
    monkeypatch.setenv("GRPO_MLFLOW_URL", "https://mlflow.example.org/")
    assert mlflow_pages("http://mlflow:5000") == "https://mlflow.example.org"


@pytest.mark.long
@pytest.mark.ci
def test_a_stages_progress_is_one_artifact_updated_in_place(server):
    @flow(flow_run_name="progress", persist_result=False)
    def progresses():
        known = {}
        for percent in (10.0, 20.0):
            orchestrator.show_artifact("progress-s", percent, f"{percent:g} done", known)
            orchestrator.show_artifact("links-s", f"at {percent:g}", "s", known)
        orchestrator.show_artifact("figures", [{"metric": "kl", "value": 0.5}], "d")

    progresses()
    found = shown(server, "progress")
    assert (found["progress-s"]["data"], found["progress-s"]["description"]) == (20.0, "20 done")
    assert found["links-s"]["data"] == "at 20"
    assert found["figures"]["type"] == "table"
    assert len(ask(f"{server.api}/artifacts/filter", {"flow_runs": {"name": {"any_": ["progress"]}}})) == 3


@pytest.mark.long
def test_a_step_that_takes_long_shows_what_it_does_in_prefect(server, tmp_path, no_run_log):
    def working():
        [found] = ask(f"{server.api}/artifacts/filter", {"flow_runs": {"name": {"any_": ["working"]}}}) or [None]
        return found

    @task
    def samples():
        # The artifact belongs to the task, though a thread makes it.
        with StepProgress("evaluate_model-base", tmp_path, number=4, steps=12):
            count = Count("sampling", 8, "completions")
            count.add(2)
            until(working)
            return working()

    @flow(flow_run_name="working", persist_result=False)
    def evaluates():
        return samples()

    first = evaluates()
    assert (first["key"], first["data"]) == ("progress-evaluate-model-base", 25.0)
    assert first["description"].startswith("4/12 evaluate_model-base: sampling 2/8 completions")
    assert first["task_run_id"]
    assert (working()["data"], working()["id"]) == (100.0, first["id"])


@pytest.mark.long
@pytest.mark.ci
def test_a_wait_is_the_state_of_run_and_starter(server):
    seen = []

    @flow(flow_run_name="inner", persist_result=False)
    def inner():
        orchestrator.show_waiting("waiting for card 0 of host, held by somebody")
        seen.append(states(server))
        orchestrator.show_running()
        seen.append(states(server))

    @flow(flow_run_name="outer", persist_result=False)
    def outer():
        inner()

    outer()
    waiting = ("Waiting", "waiting for card 0 of host, held by somebody")
    assert seen[0] == {"inner": waiting, "outer": waiting}
    assert {state for state, _ in seen[1].values()} == {"Running"}


def states(server):
    runs = ask(f"{server.api}/flow_runs/filter", {"flow_runs": {"name": {"any_": ["inner", "outer"]}}})
    return {run["name"]: (run["state"]["name"], run["state"]["message"]) for run in runs}


def test_an_artifacts_key_has_only_what_prefect_allows():
    assert orchestrator.artifact_key("train-Stage_1.b") == "train-stage-1-b"
