"""A run is found by its key, filled from folders, and ends with the pipeline's status."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from grpo_tasks.tracking.description import flatten, stage_params
from grpo_tasks.tracking.handle import MARKER, RunHandle
from grpo_tasks.tracking.runs import KEY_TAG, open_run
from schemas.config.run import RunConfig
from schemas.errors import TrackingError
from schemas.results.base import OutputFile
from schemas.results.publication import Publication

from .conftest import artifacts_of, history, write_journal

on_both_stores = pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)


def children(client, run):
    found = client.search_runs([run.experiment_id], f"tags.mlflow.parentRunId = '{run.run_id}'")
    return {child.data.tags["grpo.stage"]: child for child in found}


def snapshot(client, run_id):
    """Everything that the store shows of a run, down to each value."""
    run = client.get_run(run_id)
    values = {metric: history(client, run_id, metric) for metric in run.data.metrics}
    inputs = [(found.dataset.name, found.dataset.digest) for found in run.inputs.dataset_inputs]
    files = artifacts_of(client, run_id)
    return (run.info.status, run.info.end_time, dict(run.data.params), dict(run.data.tags), values, inputs, files)


@on_both_stores
def test_every_field_is_a_whole_param_and_a_file_restores_them(database, make_config):
    prompt = "".join(f"Rule {number}: think – then answer.\n" for number in range(700))
    sources = [{"path": f"part-{number}.jsonl"} for number in range(40)]
    config, client = make_config(database, data={"train": sources, "system_prompt": prompt}), MlflowClient(database)
    with open_run(config, key="long") as run:
        pass
    params = client.get_run(run.run_id).data.params
    assert params == flatten(config)
    assert len(params) > 300
    assert "".join(params[f"data.system_prompt.part{number}"] for number in range(1, 5)) == prompt
    text = Path(client.download_artifacts(run.run_id, "config.yaml")).read_text()
    assert RunConfig.model_validate(yaml.safe_load(text)) == config


def test_a_run_records_its_environment(config, client):
    with open_run(config, key="env", flow_run_id="flow-1") as run:
        pass
    tags = client.get_run(run.run_id).data.tags
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert tags["git.commit"] == (head.stdout.strip() or "none")
    assert tags["git.dirty"] in {"true", "false"}
    assert tags["seed"] == str(config.seed)
    assert tags["prefect.flow_run_id"] == "flow-1"
    environment = json.loads(Path(client.download_artifacts(run.run_id, "environment.json")).read_text())
    assert environment["python"].startswith("3.")
    assert {"torch", "transformers", "polars", "mlflow"} <= environment["packages"].keys()


def test_a_key_finds_its_run_and_fresh_makes_another(config, client):
    found = []
    for key, fresh in (("same", False), ("same", False), ("other", False), ("same", True), ("same", False)):
        with open_run(config, key=key, fresh=fresh) as run:
            found.append(run.run_id)
    assert found[0] == found[1]
    assert found[3] == found[4]
    assert len(set(found)) == 3
    assert client.get_run(found[0]).data.tags[KEY_TAG] == "same"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status"),
    [(None, "FINISHED"), (ValueError("x"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(1), "KILLED")],
)
def test_a_run_and_its_children_end_with_the_status_of_the_pipeline(config, client, make_stage, fault, status):
    stage = make_stage(config, steps=3, finish=False)

    def go():
        with open_run(config, key="end") as run:
            run.follow(stage.directory).ship()
            if fault:
                raise fault

    if fault:
        with pytest.raises(type(fault)):
            go()
    else:
        go()
    found = client.search_runs([client.get_experiment_by_name(config.experiment).experiment_id])
    assert [run.info.status for run in found] == [status] * 2
    with open_run(config, key="end") as run:
        run.child("format", stage.key).tags({"note": "resumed"})
    assert {run.info.status for run in [client.get_run(run.run_id), *children(client, run).values()]} == {"FINISHED"}


@pytest.mark.long
@pytest.mark.parametrize("database", ["sqlite", pytest.param("server", marks=pytest.mark.ci)], indirect=True)
def test_recording_everything_twice_changes_nothing(
    config, client, make_stage, data_report, lab_report, make_evaluation, make_merge
):
    stages = [make_stage(config), make_stage(config, "correctness", key="b" * 16, steps=30)]
    evaluations = [make_evaluation("base", 0.3), make_evaluation("merged", 0.9, "c" * 16)]
    results = [data_report, lab_report, evaluations[0], *stages, make_merge(), evaluations[1]]

    def record(flow):
        with open_run(config, key="twice", flow_run_id=flow) as run:
            return run, [run.record(result) for result in results]

    run, outcomes = record("flow-1")
    assert all(outcomes)
    ids = [run.run_id, *(child.info.run_id for child in children(client, run).values())]
    assert len(ids) == 3
    before = [snapshot(client, run_id) for run_id in ids]
    run, outcomes = record("flow-2")
    assert not any(outcomes)
    assert [snapshot(client, run_id) for run_id in ids] == before
    # As after kills between the work and its marker.
    for run_id in ids:
        client.delete_tag(run_id, MARKER)
    run, outcomes = record("flow-1")
    assert all(outcomes)
    after = [snapshot(client, run_id) for run_id in ids]
    assert [state[2:] for state in after] == [state[2:] for state in before]
    table = json.loads(Path(client.download_artifacts(run.run_id, "lab/probes.json")).read_text())
    assert len(table["data"]) == 2, "the table was appended to"


@pytest.mark.slow
def test_long_markers_span_tags_and_old_ones_are_read(config, client):
    markers = [f"evaluate_model.{'x' * 40}.{number}" for number in range(200)]
    with open_run(config, key="k") as run:
        client.set_tag(run.run_id, f"{MARKER}.train_stage.old", "true")
        run.handle = RunHandle(run.store, client.get_run(run.run_id))
        assert all(run.handle.once(marker, lambda: None) for marker in markers)
    assert f"{MARKER}.2" in client.get_run(run.run_id).data.tags
    again = RunHandle(run.store, client.get_run(run.run_id))
    assert not any(again.once(marker, lambda: None) for marker in [*markers, "train_stage.old"])


def ship_and_be_killed(run, stage):
    run.follow(stage.directory).ship()
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_killed_stage_resumes_in_the_same_child_run(config, client, make_stage):
    stage = make_stage(config, steps=25, finish=False)
    with pytest.raises(KeyboardInterrupt), open_run(config, key="cut") as run:
        ship_and_be_killed(run, stage)
    first = children(client, run)["format"]
    assert first.info.status == "KILLED"
    write_journal(stage.directory / "metrics.jsonl", range(26, 41), started_ms=1_789_000_900_000)
    with open_run(config, key="cut") as run:
        assert run.follow(stage.directory).ship()
        assert children(client, run)["format"].info.status == "RUNNING"
        run.record(stage)
    child = children(client, run)["format"]
    assert (child.info.run_id, child.info.status) == (first.info.run_id, "FINISHED")
    assert child.data.params == stage_params(config, "format")
    assert [step for step, _, _ in history(client, child.info.run_id, "reward")] == list(range(1, 41))


def test_a_publication_that_is_repeated_without_files_is_not_recorded_again(config, client, tmp_path):
    files = (OutputFile(path="spec.json", bytes=2, sha256="0" * 64),)
    known = {"model_name": "m", "model_version": "3", "champion": True, "tests": [], "reason": "better than the base"}
    first = Publication(key="2" * 16, directory=tmp_path, seconds=0.1, run_id="x", **known).sealed(files)
    with open_run(config, key="published", flow_run_id="one") as run:
        run.record(first)
    # Publishing again logs no model: its step leaves no files.
    with open_run(config, key="published", flow_run_id="two") as run:
        run.record(first.sealed(()))
    assert client.get_run(run.run_id).data.tags["prefect.flow_run_id"] == "one"


def test_a_setting_that_changes_under_the_same_key_becomes_a_tag(database, make_config):
    ids = []
    for changes in ({}, {"resources": {"num_threads": 2}}):
        with open_run(make_config(database, **changes), key="res") as run:
            ids.append(run.run_id)
    assert ids[0] == ids[1]
    data = MlflowClient(database).get_run(run.run_id).data
    assert data.params["resources.num_threads"] == "null"
    assert data.tags["param.resources.num_threads"] == "2"


def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(config, client):
    with open_run(config, key="x") as run:
        pass
    client.delete_experiment(run.experiment_id)
    with pytest.raises(TrackingError, match="deleted") as caught, open_run(config, key="x"):
        pass
    assert "mlflow experiments restore" in caught.value.fix
    assert caught.value.place == config.tracking.tracking_uri


def test_the_default_store_is_a_database_in_the_working_directory(database, make_config, tmp_path):
    with open_run(make_config(None), key="default") as run:
        assert run.store.uri == database
    assert MlflowClient(database).get_run(run.run_id).info.status == "FINISHED"
    assert (tmp_path / "mlruns").is_dir()


def test_artifacts_that_a_moved_project_has_left_behind_are_said(database, make_config, tmp_path, monkeypatch):
    # A name of its own: MLflow keeps one store for each address, and a relative one means the folder of its first use.
    config = make_config("sqlite:///left.db")
    with open_run(config, key="here") as run:
        assert run.said_about_files() == ""
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(tmp_path / "left.db", moved)
    monkeypatch.chdir(moved)
    with open_run(config, key="there") as run:
        assert f"in {tmp_path}/mlruns" in run.said_about_files()
