"""The best checkpoint and the best stage of all runs are found by one search of MLflow's."""

import mlflow
import pytest
from mlflow import MlflowClient

from grpo_tasks.tracking.description import stage_params
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.runs import open_run

from ..conftest import history, verdict, write_journal


@pytest.fixture
def client(database):
    mlflow.set_tracking_uri(database)
    return MlflowClient(database)


def finished_stage(make_stage, config, *, key, shift):
    """A stage with two checkpoints whose journal is `shift` better."""
    stage = make_stage(config, key=key * 16)
    (stage.directory / "metrics.jsonl").unlink()
    write_journal(stage.directory / "metrics.jsonl", range(1, 41), shift=shift)
    for step in (20, 40):
        (stage.directory / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    return stage


def best(client, config, metric):
    experiment = client.get_experiment_by_name(config.experiment).experiment_id
    order = [{"field_name": f"metrics.{metric}", "ascending": False}]
    return mlflow.search_logged_models([experiment], order_by=order, max_results=1, output_format="list")[0]


@pytest.mark.long
@pytest.mark.ci
def test_the_best_checkpoint_of_three_runs_is_found_by_a_search(
    client, database, make_config, make_stage, make_evaluation, data_report
):
    config = make_config(database)
    for key, accuracy in (("a", 0.5), ("b", 0.8), ("c", 0.7)):
        stage = finished_stage(make_stage, config, key=key, shift=accuracy)
        with open_run(config, key=key) as run:
            run.record(data_report)
            run.record(stage)
            run.record(make_evaluation("format", accuracy, key * 16))
    found = best(client, config, "accuracy")
    assert (found.name, found.model_type, found.tags["grpo.sha256"]) == ("format", "stage", "5" * 64)
    assert found.tags["path"].endswith("format-bbbbbbbb/final")
    [accuracy] = [metric for metric in found.metrics if metric.key == "accuracy"]
    assert (accuracy.value, accuracy.step, accuracy.dataset_name) == (0.8, 40, "eval")
    assert data_report.digest.startswith(accuracy.dataset_digest)
    assert found.params["learning_rate"] == "0.001"
    assert found.params["model.lora.r"] == "16"
    checkpoint = best(client, config, "reward")
    assert (checkpoint.name, checkpoint.model_type, checkpoint.tags["step"]) == ("format-step-40", "checkpoint", "40")
    assert "format-bbbbbbbb" in checkpoint.tags["path"]
    assert {metric.key: metric.value for metric in checkpoint.metrics}["reward"] == pytest.approx(4.8)


@pytest.mark.long
def test_linking_a_checkpoint_adds_no_point_and_can_repeat(client, database, make_config, make_stage, make_evaluation):
    config = make_config(database)
    stage = finished_stage(make_stage, config, key="a", shift=0.0)
    evaluation = make_evaluation("format", 0.5)
    for _ in range(2):
        with open_run(config, key="k") as run:
            run.record(stage)
            run.record(evaluation)
        child = run.child("format", stage.key).run_id
        assert [step for step, _, _ in history(client, child, "reward")] == list(range(1, 41))
        assert [value for _, value, _ in history(client, child, "accuracy")] == [0.5]
        models = client.search_logged_models([run.experiment_id])
        assert sorted(model.name for model in models) == ["format", "format-step-20", "format-step-40"]
        assert {model.status for model in models} == {"READY"}
        for run_id in (child, run.run_id):
            # As after a kill between the work and its marker.
            client.delete_tag(run_id, "grpo.recorded")


@pytest.mark.long
def test_the_best_model_and_checkpoint_are_found_as_documented(
    client, database, make_config, make_stage, make_merge, make_evaluation, data_report
):
    config = make_config(database)
    for key, accuracy in (("a", 0.6), ("b", 0.9)):
        evaluation = make_evaluation("merged", accuracy, key * 16)
        with open_run(config, key=key) as run:
            run.record(data_report)
            run.record(finished_stage(make_stage, config, key=key, shift=accuracy))
            run.record(evaluation)
            for _ in range(2):
                publish(
                    run,
                    make_merge(key),
                    tests=[verdict("base", False)],
                    champion=None,
                    evaluation=evaluation,
                    log=log_model,
                    prove=lambda _: None,
                )
    experiments = [client.get_experiment_by_name(config.experiment).experiment_id]
    order = [{"field_name": "metrics.accuracy", "ascending": False}]
    merged = mlflow.search_logged_models(experiments, "name = 'model'", order_by=order, output_format="list")
    assert [model.source_run_id == run.run_id for model in merged] == [True, False]
    [accuracy] = [metric for metric in merged[0].metrics if metric.key == "accuracy"]
    assert accuracy.value == 0.9
    order = [{"field_name": "metrics.reward", "ascending": False}]
    checkpoints = mlflow.search_logged_models(experiments, "model_type = 'checkpoint'", order_by=order, output_format="list")
    assert [model.name for model in checkpoints] == ["format-step-40"] * 2 + ["format-step-20"] * 2
    assert "format-bbbbbbbb" in checkpoints[0].tags["path"]


@pytest.mark.slow
def test_the_parameters_people_search_by_are_kept(client, database, make_config, make_stage):
    config = make_config(database)
    stage = finished_stage(make_stage, config, key="a", shift=0.0)
    with open_run(config, key="k") as run:
        run.record(stage)
    params = stage_params(config, "format")
    wanted = {name for name in params if name.startswith(("learning_rate", "model.lora.", "reward.", "rollout.temperature"))}
    assert len(params) > 100
    assert len(wanted) > 10
    for model in client.search_logged_models([run.experiment_id]):
        assert {name: model.params.get(name) for name in wanted} == {name: params[name] for name in wanted}
