"""A run that is killed before any request to MLflow resumes: one run, no step twice, one complete model."""

from functools import partial

import pytest
from mlflow import MlflowClient

from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.proof import prove_served
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.runs import open_run
from tests.kill_at import REQUESTS, count_calls, is_killed_at, some
from tests.tracking.conftest import artifacts_of, history, verdict

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

POINTS = 5


def record_run(config, stage, evaluation, proof):
    """Record a run with one stage and a model that becomes champion."""
    with open_run(config, key="cut") as run:
        run.follow(stage.directory).ship()
        for result in (stage, evaluation, proof):
            run.record(result)
        tests = [verdict("base", True)]
        publish(run, proof, tests=tests, champion=None, evaluation=evaluation, log=log_model, prove=prove_served)


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
    experiment = client.get_experiment_by_name(config.experiment).experiment_id
    name, runs = config.registered_model, {}
    for run in client.search_runs([experiment]):
        metrics = [metric for metric in run.data.metrics if not metric.startswith("system/")]
        curves = {metric: [(step, value) for step, value, _ in history(client, run.info.run_id, metric)] for metric in metrics}
        known = (run.info.status, len(run.data.params), curves, artifacts_of(client, run.info.run_id))
        runs.setdefault(run.data.tags.get("grpo.stage", ""), []).append(known)
    return {
        "runs": runs,
        "models": [
            (str(model.status), model_files(client, model.model_id)) for model in client.search_logged_models([experiment])
        ],
        "versions": [(version.version, version.status) for version in client.search_model_versions(f"name='{name}'")],
        "champion": client.get_registered_model(name).aliases,
    }


def model_files(client, model_id, folder=None):
    """Files of a logged model with their sizes, except that of MLmodel, which contains the time."""
    found = []
    for entry in client.list_logged_model_artifacts(model_id, folder):
        inside = model_files(client, model_id, entry.path) if entry.is_dir else [(entry.path, entry.file_size)]
        found += [(path, path != "MLmodel" and size) for path, size in inside]
    return sorted(found)
