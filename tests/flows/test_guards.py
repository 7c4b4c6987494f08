"""A guard that fires is reported everywhere; and what the processes of a run import is in the keys of its steps."""

import json
import re
import time

import pytest
import yaml

from grpo_tasks.running.key import MACHINERY, code_behind
from tests.flows.place import ROOT, SMALL, ask

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("demo")]

WILD = SMALL["stages"][0] | {"max_steps": 30, "beta": 0.001, "learning_rate": 0.05, "skip_dead_groups": False}


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


IMPORTED = re.compile(r"import time:[^|]*\|[^|]*\|\s+((?:grpo_tasks|schemas)\.[\w.]+)")
PROCESSES = {
    "train_stage": "grpo_tasks.grpo.trainer",
    "evaluate_model": "grpo_tasks.rollout.local",
    "probe_rewards": "",
    "merge_adapter": "",
}


def test_every_module_of_a_steps_process_counts_in_its_key(place, monkeypatch):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    place.write("imports.yaml", yaml.safe_dump(SMALL | {"name": "imports"}))
    place.grpo("run", "imports.yaml")
    imported = {}
    for log in place.root.glob("runs/imports/*/*/*"):
        if log.suffix in {".txt", ".log"}:
            found = set(IMPORTED.findall(log.read_text(errors="replace")))
            # The file of a package holds a docstring only.
            modules = {name for name in found if (ROOT / f"{name.replace('.', '/')}.py").exists()}
            imported.setdefault(log.parts[-3], set()).update(modules)
    for step, module in PROCESSES.items():
        # That its process said what it imports; a merge needs the fewest.
        assert len(imported[step]) > 10, step
        assert not module or module in imported[step]
    for step, names in imported.items():
        assert {name for name in names if not name.startswith(MACHINERY)} <= set(code_behind(f"grpo_tasks.steps.{step}")), step
