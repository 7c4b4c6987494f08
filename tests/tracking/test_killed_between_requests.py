"""A run that is killed before any request to MLflow resumes: one run, no step twice, one complete model."""

from functools import partial

import pytest
from mlflow import MlflowClient

from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.served.proof import prove_served
from schemas.results.evaluation import PairedTest
from tests.kill_at import REQUESTS, count_calls, is_killed_at, some
from tests.tracking.conftest import history

pytestmark = [pytest.mark.long, pytest.mark.ci, pytest.mark.timeout(1800)]

POINTS = 8
BETTER = PairedTest(against="base", metric="accuracy", prompts=64, difference=0.3, p_value=0.001, better=True)


def record_run(config, stage, evaluation, proof):
    """Record a run with one stage and a model that becomes champion."""
    with open_run(config, key="cut") as run:
        run.follow(stage.directory).ship()
        run.record(stage)
        run.record(evaluation)
        run.record(proof)
        publish(run, proof, tests=[BETTER], champion=None, evaluation=evaluation, log=log_model, prove=prove_served)


def test_a_run_killed_before_any_request_completes_the_same(server, make_config, make_stage, make_evaluation, make_merge):
    stage, evaluation, proof = make_stage(make_config(server)), make_evaluation("merged"), make_merge()
    uninterrupted = make_config(server, name="uninterrupted")
    requests = count_calls(partial(record_run, uninterrupted, stage, evaluation, proof), REQUESTS)
    wanted = stored(server, uninterrupted)
    assert requests > 40
    assert wanted["versions"] == [("1", "READY")]
    for number in some(requests, POINTS, seed=5):
        config = make_config(server, name=f"killed-at-{number}")
        work = partial(record_run, config, stage, evaluation, proof)
        assert is_killed_at(number, work, REQUESTS), f"request {number} of {requests}"
        assert not is_killed_at(0, work, REQUESTS)
        assert stored(server, config) == wanted, f"killed before request {number} of {requests}"


def stored(address, config):
    """What the server has of the runs and the model of a config."""
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(config.tracking.experiment or config.name)
    runs = client.search_runs([experiment.experiment_id])
    models = client.search_logged_models([experiment.experiment_id])
    name = config.registered_model
    return {
        "runs": sorted((run.data.tags.get("grpo.stage", ""), run.info.status) for run in runs),
        "params": sorted(len(run.data.params) for run in runs),
        "metrics": sorted(
            (metric, [(step, value) for step, value, _ in history(client, run.info.run_id, metric)])
            for run in runs
            for metric in run.data.metrics
            if not metric.startswith("system/")
        ),
        "artifacts": sorted((run.data.tags.get("grpo.stage", ""), files(client, run.info.run_id)) for run in runs),
        "models": [(str(model.status), model_files(client, model.model_id)) for model in models],
        "versions": [(version.version, version.status) for version in client.search_model_versions(f"name='{name}'")],
        "champion": client.get_registered_model(name).aliases,
    }


def files(client, run_id, folder=None):
    """Artifacts of a run."""
    found = []
    for entry in client.list_artifacts(run_id, folder):
        found += files(client, run_id, entry.path) if entry.is_dir else [entry.path]
    return sorted(found)


def model_files(client, model_id, folder=None):
    """Files of a logged model with their sizes, except that of MLmodel, which contains the time."""
    found = []
    for entry in client.list_logged_model_artifacts(model_id, folder):
        found += (
            model_files(client, model_id, entry.path)
            if entry.is_dir
            else [(entry.path, entry.path != "MLmodel" and entry.file_size)]
        )
    return sorted(found)
