"""What a list of runs says about a run that has ended, and that Prefect keeps no copy of its result."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_tasks.operating.servers import ADDRESSES, FOLDER, PREFECT, STATE
from grpo_tasks.processes.lifetime import ProcessIdentity
from schemas.metrics import ACCURACY
from schemas.results.evaluation import EvalReport, Interval, PairedTest, Regression
from schemas.results.model import ModelRef
from schemas.results.publication import PipelineResult, Publication, RetrainResult
from tests.flows.place import ask

pytestmark = pytest.mark.timeout(900)


def published(tmp_path, *, champion, tests, **found):
    step = {"key": "k", "directory": tmp_path, "seconds": 1.0}
    metrics = {ACCURACY: Interval(value=0.78, low=0.7, high=0.8)}
    numbers = {"prompts": 9, "num_samples": 2, "temperature": 1.0, "confidence": 0.95, "metrics": metrics, "pass_at_k": {}}
    merged = EvalReport(**step, **numbers, label="merged", model=ModelRef(path="m"))
    names = {"run_id": "r", "model_name": "small", "model_version": "7", "reason": "better than the base"}
    publication = Publication(**step, **names, champion=champion, tests=tests, **found)
    return PipelineResult(publication=publication, evaluations=[merged], merged_as="float16", report=tmp_path / "report.html")


def paired(against, difference):
    return PairedTest(against=against, metric=ACCURACY, prompts=9, difference=difference, p_value=0.003, better=difference > 0)


def check(metric, ours, theirs, limit):
    return Regression(metric=metric, against="champion", ours=ours, theirs=theirs, limit=limit, passed=False)


FAILED = "v7 not promoted: accuracy 71.0 % -> 78.0 % (against the champion, p = 0.003)"
BETTER = [paired("base", 0.4), paired("champion", 0.07)]
TRUNCATED, LENGTH = check("truncated_rate", 0.2, 0.0, 0.05), check("mean_length", 90, 30, 60)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"champion": True, "tests": BETTER},
            "promoted v7: accuracy 71.0 % -> 78.0 % (against the champion, p = 0.003)",
        ),
        ({"tests": [paired("base", -0.02)]}, "v7 not promoted: accuracy 80.0 % -> 78.0 % (against the base, p = 0.003)"),
        ({"tests": []}, "v7 not promoted: better than the base"),
        # Of two tests the failed one is shown.
        (
            {"tests": [paired("base", 0.0), paired("champion", 0.07)]},
            "v7 not promoted: accuracy 78.0 % -> 78.0 % (against the base, p = 0.003)",
        ),
        (
            {"tests": BETTER, "regressions": [TRUNCATED, LENGTH]},
            f"{FAILED}; truncated_rate 0.2 against 0 of the champion, limit 0.05; "
            "mean_length 90 against 30 of the champion, limit 60",
        ),
        ({"tests": BETTER, "obstacle": "rejected by bob (too long)"}, f"{FAILED}; rejected by bob (too long)"),
    ],
)
def test_a_run_says_version_figures_and_what_stood_in_its_way(tmp_path, found, said):
    made = published(tmp_path, **{"champion": False} | found)
    assert made.headline() == said
    assert RetrainResult(trained=True, reason="r", summary=made.headline()).headline() == said


@pytest.mark.long
def test_the_list_of_runs_shows_results_and_no_pickle_remains(place, small):
    small()
    place.grpo("validate", "small.yaml")
    [run] = ask(f"{place.api}/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    assert run["state"]["message"] == "240 rows read: 200 to train on, 40 held out"
    assert not list((place.root / "prefect").rglob("storage/*"))


@pytest.mark.long
@pytest.mark.parametrize("by_stack", [False, True], ids=["environment", "the stack of the folder"])
def test_a_command_that_changes_the_champion_sends_the_event_for_automations(prefect_api, tmp_path, by_stack):
    resource = f"grpo.model.told-{'stack' if by_stack else 'environment'}"
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    if by_stack:
        # What `grpo up` leaves in its folder; this process stands for the server's.
        own = ProcessIdentity.of()
        (tmp_path / FOLDER).mkdir()
        (tmp_path / FOLDER / STATE).write_text(json.dumps([{"name": PREFECT, "pid": own.pid, "born": own.born}]))
        addresses = {"prefect": prefect_api.removesuffix("/api"), "mlflow": "http://127.0.0.1:1"}
        (tmp_path / FOLDER / ADDRESSES).write_text(json.dumps(addresses))
    else:
        environment |= {"PREFECT_API_URL": prefect_api}
    code = f"from flows.cli.models import tell_prefect; tell_prefect('grpo.champion.changed', '{resource}', 'rolled back')"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)
    wanted = {"filter": {"event": {"name": ["grpo.champion.changed"]}, "resource": {"id": [resource]}}}
    deadline = time.monotonic() + 120
    while not (found := ask(f"{prefect_api}/events/filter", wanted)["events"]):
        assert time.monotonic() < deadline, "the event did not arrive"
        time.sleep(0.3)
    assert found[0]["payload"]["detail"] == "rolled back"


LATE_REPLY = """
from prefect.client.base import PrefectHttpxSyncClient
from flows.temporary_server import locked_flow
from schemas.results.publication import RetrainResult

send = PrefectHttpxSyncClient.send

def send_twice(client, request, *args, **kwargs):
    reply = send(client, request, *args, **kwargs)
    # The first reply to the final state is lost, and Prefect's client asks again.
    return send(client, request, *args, **kwargs) if b'"COMPLETED"' in request.content else reply

PrefectHttpxSyncClient.send = send_twice

@locked_flow(name="late", description="Its server is late with a reply.")
def late():
    return RetrainResult(trained=True, reason="r", summary="kept")

print("ANSWER", late().summary)
"""


def test_a_flow_whose_server_is_late_with_its_reply_returns_its_result(prefect_api, tmp_path):
    environment = os.environ | {"PREFECT_API_URL": prefect_api, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, "-c", LATE_REPLY], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "ANSWER kept" in done.stdout, done.stderr[-3000:]
