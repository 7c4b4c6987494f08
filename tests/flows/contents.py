"""The results of a finished pipeline that must be the same every time."""

import json
from pathlib import Path

import polars as pl

from grpo_tasks.stage.stage_dir import StageDir
from schemas.results.model import StageResult
from tests.flows.place import Place

TIMES = {"step_time", "rollout_time", "reward_time", "tokens_per_s", "merge/seconds"}
"""Metrics that differ between any two runs."""


def contents(place: Place) -> dict:
    """What a finished pipeline left that has to be the same every time."""
    runs = place.runs("small")
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.data.tags["grpo.stage"]: run for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert len(children) == len(runs) - 1
    stages = [StageResult.load(path) for path in sorted(place.root.glob("runs/small/train_stage/*/result.json"))]
    return {
        "status": [parent.info.status, *(run.info.status for run in children.values())],
        "events": {stage.stage: _events(StageDir(stage.directory).events) for stage in stages},
        "adapters": {stage.stage: (stage.sha256, stage.steps) for stage in stages},
        "merged": [json.loads(path.read_text())["sha256"] for path in place.root.glob("runs/small/merge_adapter/*/result.json")],
        "samples": {
            path.parent.name.rpartition("-")[0]: pl.read_parquet(path).write_json()
            for path in place.root.glob("runs/small/evaluate_model/*/samples.parquet")
        },
        "params": {name: dict(run.data.params) for name, run in {"parent": parent, **children}.items()},
        "metrics": {name: _history(place, run) for name, run in {"parent": parent, **children}.items()},
        "artifacts": {name: sorted(_artifacts(place, run.info.run_id)) for name, run in {"parent": parent, **children}.items()},
        "versions": [
            (int(version.version), version.tags["grpo.sha256"]) for version in place.client.search_model_versions("name='small'")
        ],
        "aliases": {alias: str(version) for alias, version in place.client.get_registered_model("small").aliases.items()},
    }


def _history(place: Place, run) -> dict:
    measured = {name for name in run.data.metrics if not name.startswith("system/")}
    names = sorted(measured - TIMES - {f"final/{name}" for name in TIMES})
    return {
        name: [(point.step, point.value) for point in place.client.get_metric_history(run.info.run_id, name)] for name in names
    }


def _artifacts(place: Place, run_id: str, folder: str | None = None) -> list[str]:
    found = []
    for entry in place.client.list_artifacts(run_id, folder):
        found += _artifacts(place, run_id, entry.path) if entry.is_dir else [entry.path]
    # What a step whose process was killed has left is kept, and is no part of the result.
    # An event says that a stage went on; a slow step logs how far it has come.
    return [path for path in found if not path.startswith(("failed/", "logs/")) and path != "events.jsonl"]


def _events(path: Path) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["step"], line["event"]) for line in lines if line["event"] != "resumed"]


def differences(found: dict, wanted: dict, where: str) -> list[str]:
    return [f"{where}: {name}: {_say(found[name], wanted[name])}" for name in wanted if found[name] != wanted[name]]


def _say(found: object, wanted: object) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        return "; ".join(
            f"{key}: {_say(found.get(key), wanted.get(key))}"
            for key in sorted(found.keys() | wanted.keys())
            if found.get(key) != wanted.get(key)
        )
    return f"{str(found)[:300]} instead of {str(wanted)[:300]}"
