"""Sweeps: real runs of a shortened demo with their own Prefect and MLflow stores."""

import csv
import json
import os
import re
import signal
import time
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pytest
import yaml

from schemas.results.sweep import VariantEnd
from tests.flows.place import SMALL, ask

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SHORT = SMALL | {
    "name": "short",
    "data": SMALL["data"] | {"train": [{"path": "embedded:arithmetic_train.jsonl"}]},
    "stages": [
        SMALL["stages"][0] | {"max_steps": 20, "per_device_train_batch_size": 32, "save_steps": 20, "num_eval_prompts": 32}
    ],
}
"""Long enough that a useful learning rate beats one that changes nothing."""
RATES = ("--over", "stages.0.learning_rate=1e-3,1e-7")
GRID = (*RATES, "--over", "stages.0.num_generations=4,8")
RATE, GROUP = "stages.0.learning_rate", "stages.0.num_generations"


def sweep(place, *options):
    return place.grpo("sweep", "short.yaml", *options, timeout=1700)


def folders(place):
    return sorted(place.root.glob("runs/short/sweeps/*/runs/*"))


def ends(place):
    return [VariantEnd.load(folder / "result.json") for folder in folders(place)]


def journals(place):
    return {path: path.read_bytes() for path in place.root.glob("runs/short/train_stage/*/metrics.jsonl")}


def parent_and_runs(place):
    found = place.runs("short")
    [parent] = [run for run in found if run.data.tags.get("grpo.sweep") == "yes"]
    children = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    return parent, {run.info.run_id: run for run in children}


def test_a_sweep_with_two_seeds_is_pruned_tabled_and_computed_once(place):
    place.write("short.yaml", yaml.safe_dump(SHORT))
    output = sweep(place, *RATES, "--seeds", 2, "--parallel", 2)
    states = [end.state for end in ends(place)]
    assert len(states) == 4
    assert set(states) == {"finished", "pruned"}
    parent, children = parent_and_runs(place)
    check_runs(place, children, states)
    check_parent(place, parent, children, states)
    check_prefect(place, states)
    assert f"{states.count('pruned')} of 4 pruned" in output
    assert f"{parent.data.tags['grpo.sweep_verdict'].partition(':')[0]}: " in output
    before = journals(place)
    written = [folder.joinpath("result.json").stat().st_mtime_ns for folder in folders(place)]
    again = sweep(place, *RATES, "--seeds", 2)
    assert "nothing to do: every run of this sweep has ended" in again
    assert journals(place) == before
    assert [folder.joinpath("result.json").stat().st_mtime_ns for folder in folders(place)] == written
    assert len(place.runs("short")) == 1 + 4 + 4
    publish(place, output, before)


def check_runs(place, children, states):
    """Every run is a child of the sweep with its parameters; a pruned one says why, and has a checkpoint and no result."""
    found = ends(place)
    assert set(children) == {end.run_id for end in found}
    for end, state in zip(found, states, strict=True):
        run = children[end.run_id]
        assert run.info.status == ("FINISHED" if state == "finished" else "KILLED")
        assert run.data.tags["grpo.ended"].startswith(state)
        assert float(run.data.params[RATE]) in (1e-3, 1e-7)
        assert run.data.params["seed"] in ("7", "8")
        assert ("accuracy" in run.data.metrics) == (state == "finished")
    # The rate that changes nothing is not the better one.
    pruned = [end for end in found if end.state == "pruned"]
    assert any(float(children[end.run_id].data.params[RATE]) == 1e-7 for end in pruned)
    unfinished = [path for path in place.root.glob("runs/short/train_stage/*") if not (path / "result.json").exists()]
    assert len(unfinished) == states.count("pruned")
    assert all(list(path.glob("checkpoints/step-*")) for path in unfinished)
    assert place.client.search_registered_models() == [], "a sweep registers nothing"


def check_parent(place, parent, children, states):
    """The parent names the best run, and its table and its link know all runs."""
    folder = place.client.download_artifacts(parent.info.run_id, "sweep", str(place.root))
    rows = list(csv.DictReader(Path(folder, "runs.csv").read_text().splitlines()))
    assert [row["ended"] for row in rows] == states
    assert {(float(row[RATE]), row["seed"]) for row in rows} == {(rate, seed) for rate in (1e-3, 1e-7) for seed in "78"}
    finished = [row for row in rows if row["ended"] == "finished"]
    assert all(float(row["accuracy low"]) <= float(row["accuracy"]) <= float(row["accuracy high"]) for row in finished)
    assert all("is below" in row["reason"] for row in rows if row["ended"] == "pruned")
    best = max(finished, key=lambda row: float(row["accuracy"]))
    assert float(best[RATE]) == 1e-3
    note = parent.data.tags["mlflow.note.content"]
    assert f"/runs/{best['mlflow run']})" in note
    assert parent.data.metrics["accuracy"] == float(best["accuracy"])
    [query] = re.findall(r"#/compare-runs\?(\S+)\)", note)
    assert set(json.loads(unquote(parse_qs(query)["runs"][0]))) == set(children)
    assert parent.info.status == "FINISHED"


def check_prefect(place, states):
    """The list of runs says what came out, and every run of the sweep is a flow run of its own there."""
    filters = {"flows": {"name": {"any_": ["grpo-sweep"]}}}
    found = [run for run in ask(f"{place.api}/flow_runs/filter", filters) if run["parameters"]["source"] == "short.yaml"]
    assert f"{states.count('pruned')} of 4 pruned" in found[0]["state"]["message"]
    runs = ask(f"{place.api}/flow_runs/filter", {"flow_runs": {"id": {"any_": [end.flow_run_id for end in ends(place)]}}})
    assert sorted(run["state"]["name"] for run in runs) == sorted(
        {"finished": "Completed", "pruned": "Pruned"}[state] for state in states
    )


def publish(place, output, before):
    """The command that the sweep prints publishes its best run, and trains nothing."""
    [command] = re.findall(r"publish the (?:best run|highest of the tie): grpo (.*)", output)
    place.grpo(*command.split())
    assert journals(place) == before
    assert [model.name for model in place.client.search_registered_models()] == ["short"]


def test_a_killed_sweep_and_a_pruned_run_can_be_continued(place):
    place.write("short.yaml", yaml.safe_dump(SHORT))
    process = place.start("sweep", "short.yaml", *GRID)
    deadline = time.monotonic() + 600
    while not list(place.root.glob("runs/short/sweeps/*/runs/002/curves/*.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = folders(place)[0] / "result.json"
    written = first.stat().st_mtime_ns
    sweep(place, *GRID)
    assert first.stat().st_mtime_ns == written, "what had finished is not run again"
    stopped = [end.state for end in ends(place)]
    assert len(stopped) == 4
    assert "pruned" in stopped
    journal_lines = {path: len(text.splitlines()) for path, text in journals(place).items()}
    sweep(place, *GRID, "--no-prune")
    assert {end.state for end in ends(place)} == {"finished"}
    for path, text in journals(place).items():
        steps = [json.loads(line)["step"] for line in text.splitlines()]
        assert steps == list(range(1, 21)), "each update once: the run went on from its checkpoint"
        assert len(steps) >= journal_lines[path]
    parent, children = parent_and_runs(place)
    assert parent.info.status == "FINISHED"
    assert parent.data.params[f"over.{GROUP}"] == "4, 8"
    combined = {(float(run.data.params[RATE]), run.data.params[GROUP]) for run in children.values()}
    assert combined == {(rate, group) for rate in (1e-3, 1e-7) for group in "48"}
