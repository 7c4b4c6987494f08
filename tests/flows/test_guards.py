"""A guard that fires is reported in the log, in Prefect and in MLflow."""

import json
import time

import pytest
import yaml

from tests.flows.place import SMALL, ask

pytestmark = [pytest.mark.xdist_group("demo")]

WILD = SMALL["stages"][0] | {"max_steps": 30, "beta": 0.001, "learning_rate": 0.05, "skip_dead_groups": False}


@pytest.mark.long
def test_a_guard_that_stops_is_reported_in_log_prefect_and_mlflow(place):
    place.write("wild.yaml", yaml.safe_dump(SMALL | {"name": "wild", "stages": [WILD | {"guards": {"kl_blow_up": "stop"}}]}))
    output = place.grpo("run", "wild.yaml", expect=1)
    assert "kl_blow_up: kl is" in output
    assert "lower the learning rate" in output

    [events] = place.root.glob("runs/wild/train_stage/*/events.jsonl")
    recorded = next(json.loads(line) for line in events.read_text().splitlines() if "kl_blow_up" in line)
    child = place.child("format", "wild")
    assert child.info.status == "FAILED"
    assert child.data.tags["grpo.event.kl_blow_up"] == f"update {recorded['step']}: {recorded['detail']}"

    resource = f"grpo.stage.{events.parent.name}"
    wanted = {"event": {"name": ["grpo.kl_blow_up"]}, "resource": {"id": [resource]}}
    deadline = time.monotonic() + 120
    # The server writes events down a few at a time.
    while not (found := ask(f"{place.api}/events/filter", {"filter": wanted})["events"]) and time.monotonic() < deadline:
        time.sleep(0.5)
    [event] = found
    assert event["payload"] == {"stage": "format", "update": recorded["step"], "detail": recorded["detail"]}
    assert event["related"][0]["prefect.resource.id"].startswith("prefect.flow-run.")
