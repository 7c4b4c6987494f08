"""Held-out sets and system prompts have versions in MLflow, and runs and models name the version that they used."""

import json

import polars as pl
import pytest
from mlflow import MlflowClient

from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.served.proof import prove_served
from schemas.results.evaluation import PairedTest

BETTER = PairedTest(against="base", metric="accuracy", prompts=64, difference=0.3, p_value=0.001, better=True)


@pytest.fixture
def client(database):
    return MlflowClient(database)


@pytest.mark.slow
def test_a_held_out_set_has_a_second_version_after_the_data_changed(client, database, make_config, data_report):
    config = make_config(database)

    def recorded(key, report):
        with open_run(config, key=key) as run:
            run.record(report)
        return run, client.get_run(run.run_id).data.tags["held_out"]

    run, first = recorded("one", data_report)
    assert recorded("two", data_report.model_copy(update={"key": "e" * 16}))[1] == first == f"{config.name} held-out v1"
    rows = pl.read_parquet(data_report.eval).head(3)
    rows.write_parquet(data_report.eval)
    assert recorded("three", data_report.model_copy(update={"key": "f" * 16}))[1] == f"{config.name} held-out v2"
    found = {dataset.name: dataset for dataset in client.search_datasets(experiment_ids=[run.experiment_id])}
    assert {name: dataset.tags["rows"] for name, dataset in found.items()} == {
        f"{config.name} held-out v1": "4",
        f"{config.name} held-out v2": "3",
    }
    with run.store.as_default():
        records = found[first].to_df()
    assert sorted(json.dumps([row["inputs"], row["expectations"]]) for _, row in records.iterrows())[0] == json.dumps(
        [{"messages": [{"role": "user", "content": "What is 0 + 1?"}]}, {"expected_response": "1"}]
    )


@pytest.mark.slow
def test_a_system_prompt_has_a_version_for_each_text(client, database, make_config, make_merge, make_evaluation):
    texts = {"one": "Use {{tags}}.", "two": "Be brief.", "three": "Use {{tags}}."}
    versions = {}
    for key, text in texts.items():
        config = make_config(database, data={"train": [{"path": "train.jsonl"}], "system_prompt": text})
        with open_run(config, key=key) as run:
            versions[key] = run.system_prompt
    assert versions["one"] == versions["three"] != versions["two"]
    name, _, number = versions["three"].rpartition("/")
    assert name == f"{config.registered_model}-system-prompt"
    linked = {"name": name, "version": number}
    assert json.loads(client.get_run(run.run_id).data.tags["mlflow.linkedPrompts"]) == [linked]
    with run.store.as_default():
        assert client.load_prompt(f"prompts:/{versions['three']}").template == texts["three"]
    with open_run(config, key="three") as run:
        publish(
            run,
            make_merge(),
            tests=[BETTER],
            champion=None,
            evaluation=make_evaluation("merged"),
            log=log_model,
            prove=prove_served,
        )
    [model] = client.search_logged_models([run.experiment_id])
    assert json.loads(model.tags["mlflow.linkedPrompts"]) == [linked]
    # The registry of models shows models only.
    assert [model.name for model in client.search_registered_models()] == [config.registered_model]


@pytest.mark.slow
def test_a_system_prompt_is_linked_to_the_run_and_its_models(client, database, make_config, make_stage):
    config = make_config(database)
    stage = make_stage(config)
    (stage.directory / "checkpoints" / "step-000020").mkdir(parents=True)
    with open_run(config, key="one") as run:
        run.record(stage)
        name, _, number = run.system_prompt.rpartition("/")
    linked = [{"name": name, "version": number}]
    child = client.get_run(run.child(stage.stage, stage.key).run_id)
    assert json.loads(child.data.tags["mlflow.linkedPrompts"]) == linked
    assert child.data.tags["system_prompt"] == f"{name}/{number}"
    models = {model.name: model for model in client.search_logged_models([run.experiment_id])}
    assert set(models) == {"format", "format-step-20"}
    assert all(json.loads(model.tags["mlflow.linkedPrompts"]) == linked for model in models.values())
