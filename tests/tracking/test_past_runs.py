"""A past run is read from MLflow alone; lists are complete, however much a store has: MLflow answers with the first rows only."""

import shutil

import polars as pl
import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from grpo_tasks.operating.trace import read_completions
from grpo_tasks.tracking.description import flatten
from grpo_tasks.tracking.entities import held_out_versions, logged_models
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.past_runs import (
    find_rejection_run,
    find_run,
    load_past_run,
    newest_run,
    parent_runs,
    recent_runs,
    registered_versions,
)
from grpo_tasks.tracking.runs import KEY_TAG, PARENT_TAG, open_run
from grpo_tasks.tracking.store import CHECK_S, Store, open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError, UserError
from schemas.metrics import CURVES, KL, REWARD


@pytest.fixture
def recorded(database, make_config, make_stage, make_evaluation, data_report):
    """A run whose folders on disk are deleted."""
    config = make_config(database)
    stage, evaluation = make_stage(config, steps=5), make_evaluation("merged", 0.9)
    with open_run(config, key="past") as run:
        run.record(data_report)
        run.record(evaluation)
        # Recording the finished stage would draw its plots, which no past run needs.
        run.follow(stage.directory).ship()
    for result in (data_report, stage, evaluation):
        shutil.rmtree(result.directory)
    return run


def test_settings_curves_samples_and_questions_come_back_by_id_or_name(recorded):
    tracking = recorded.config.tracking
    run = load_past_run(recorded.run_id[:10], tracking)
    assert (run.run_id, run.settings) == (recorded.run_id, flatten(recorded.config))
    assert set(run.curves["format"]) == set(CURVES)
    assert [step for step, _ in run.curves["format"][REWARD]] == [1, 2, 3, 4, 5]
    assert run.curves["format"][KL][-1] == (5, pytest.approx(0.005))
    assert run.samples["prompt_id"].to_list() == ["a", "b"]
    assert run.samples.schema["correct"] == pl.Boolean
    assert run.prompts[f"{3:016x}"] == "What is 3 + 1?"
    assert run.figures["merged/accuracy"] == 0.9
    assert run.data_digest == "abc123" * 10 + "abcd"
    assert load_past_run(recorded.config.name, tracking).run_id == recorded.run_id
    with pytest.raises(ModelError, match="no such run: nobody") as caught:
        load_past_run("nobody", tracking)
    assert recorded.run_id[:8] in caught.value.fix


def test_completions_of_a_removed_folder_are_in_mlflow_if_the_run_is(recorded, tmp_path):
    def refused(name, tracking):
        with pytest.raises(UserError) as caught:
            read_completions(tmp_path / "runs" / name, tracking=tracking)
        assert caught.value.place == str(tmp_path / "runs")
        assert f"no folder {name}/train_stage/*/completions" in caught.value.message
        return caught.value.fix

    name, tracking = recorded.config.name, recorded.config.tracking
    assert refused(name, tracking).startswith(f"MLflow has the run {recorded.run_id[:8]}, ")
    assert refused("nobody", tracking) == "grpo run CONFIG comes first"
    none = tmp_path / "none.db"
    assert refused(name, TrackingConfig(tracking_uri=f"sqlite:///{none}")) == "grpo run CONFIG comes first"
    assert not none.exists()


def test_a_run_without_an_evaluated_model_is_refused(database, make_config):
    config = make_config(database)
    with open_run(config, key="empty") as run:
        pass
    with pytest.raises(ModelError, match="has no evaluated model"):
        load_past_run(run.run_id, config.tracking)


@pytest.fixture
def tracking(database):
    return TrackingConfig(tracking_uri=database)


def test_runs_behind_a_sweep_and_on_later_pages_are_found(client, tracking, monkeypatch):
    monkeypatch.setattr("grpo_tasks.tracking.past_runs._RUNS_PER_PAGE", 2)
    experiment = client.create_experiment("e")

    def create(time, tags, name):
        return client.create_run(experiment, start_time=time, tags=tags, run_name=name).info.run_id

    parents = [create(time, {KEY_TAG: f"k{time}"}, f"mine{time} now") for time in (1, 2, 3, 4, 5)]
    for number in range(5):
        create(10 + number, {KEY_TAG: f"v{number}", PARENT_TAG: parents[1]}, "mine1 now")
    assert [run.info.run_id for run in parent_runs(client)] == parents[::-1]
    assert [line.run_id for line in recent_runs(tracking, 3)] == parents[:1:-1]
    store = open_store(tracking)
    for reference in ("mine1", parents[0][:12]):
        assert find_run(store, reference, tracking).info.run_id == parents[0]


def test_models_behind_the_first_hundred_are_known(client, tracking):
    for number in range(102):
        client.create_registered_model(f"m{number:03}")
    client.create_model_version("m101", "elsewhere")
    assert [line.name for line in registered_versions(tracking, "m101")] == ["m101"]


def test_a_version_whose_run_was_removed_for_good_is_listed_without_figures(client, tracking, database):
    run = client.create_run(client.create_experiment("e"))
    client.create_registered_model("m")
    client.create_model_version("m", "elsewhere", run_id=run.info.run_id)
    SqlAlchemyStore(database, "mlruns")._hard_delete_run(run.info.run_id)
    [line] = registered_versions(tracking, "m")
    assert (line.version, line.run_id, line.figures) == ("1", run.info.run_id, {})


@pytest.mark.slow
def test_checkpoints_and_held_out_sets_of_later_pages_are_known(client, tracking):
    experiment = client.create_experiment("e")
    run = RunHandle(open_store(tracking), client.create_run(experiment))
    for number in range(102):
        client.create_logged_model(experiment, name=f"format-step-{number}", source_run_id=run.run_id)
    assert len(logged_models(run)) == 102
    with run.store.as_default():
        for number in range(52):
            client.create_dataset(f"mine v{number}", experiment_id=experiment, tags={"name": "mine", "version": str(number)})
        assert len(held_out_versions(client, experiment_id=experiment, name="mine")) == 52


def test_a_report_waits_for_mlflow_as_long_as_its_run(database, monkeypatch):
    waits = []
    monkeypatch.setattr(Store, "call", lambda store, _: waits.append(store.patience_s))
    tracking = TrackingConfig(tracking_uri=database, patience_s=900)
    find_rejection_run("digest", tracking)
    newest_run("mine", tracking)
    assert waits == [900, CHECK_S]
