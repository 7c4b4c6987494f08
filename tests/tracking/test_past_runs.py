"""A past run is read from MLflow alone."""

import shutil

import polars as pl
import pytest

from grpo_tasks.tracking.description import flatten
from grpo_tasks.tracking.past_runs import load_past_run
from grpo_tasks.tracking.runs import open_run
from schemas.errors import ModelError
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


def test_settings_curves_samples_and_questions_come_back(recorded):
    run = load_past_run(recorded.run_id, recorded.config.tracking)
    assert run.settings == flatten(recorded.config)
    assert set(run.curves["format"]) == set(CURVES)
    assert [step for step, _ in run.curves["format"][REWARD]] == [1, 2, 3, 4, 5]
    assert run.curves["format"][KL][-1] == (5, pytest.approx(0.005))
    assert run.samples["prompt_id"].to_list() == ["a", "b"]
    assert run.samples.schema["correct"] == pl.Boolean
    assert run.prompts[f"{3:016x}"] == "What is 3 + 1?"
    assert run.figures["merged/accuracy"] == 0.9
    assert run.data_digest == "abc123" * 10 + "abcd"


@pytest.mark.slow
def test_a_run_is_found_by_id_or_name(recorded):
    tracking = recorded.config.tracking
    for reference in (recorded.run_id[:10], recorded.config.name):
        assert load_past_run(reference, tracking).run_id == recorded.run_id
    with pytest.raises(ModelError, match="no such run: nobody") as caught:
        load_past_run("nobody", tracking)
    assert recorded.run_id[:8] in caught.value.fix


def test_a_run_without_an_evaluated_model_is_refused(database, make_config):
    config = make_config(database)
    with open_run(config, key="empty") as run:
        pass
    with pytest.raises(ModelError, match="has no evaluated model"):
        load_past_run(run.run_id, config.tracking)
