"""The report of a run with GRPO compares it with rejection sampling on the same data. The store is a real one."""

from dataclasses import replace

import pytest

from grpo_tasks.reporting.report import against_rejection, write_html
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.runs import open_run
from tests.reporting.conftest import append
from tests.tracking.conftest import STARTED_MS, database, empty_database  # noqa: F401 - fixtures

BEST_OF = {"name": "format", "kind": "rejection", "rewards": ["format"], "max_steps": 4}
GRPO = {"name": "format", "rewards": ["correctness"], "max_steps": 4}


@pytest.fixture
def recorded(database, make_config, make_stage, make_evaluation, data_report):  # noqa: F811
    """Records a run with these stages whose merged model has this accuracy; config and run."""

    def record(key, accuracy, *stages):
        config = make_config(database, stages=list(stages))
        with open_run(config, key=key) as run:
            run.record(data_report)
            run.record(make_evaluation("merged", accuracy, key=key * 16))
            stage = make_stage(config, key=key * 16, steps=4).directory
            append(StageDir(stage).journal, {"step": 5, "timestamp_ms": STARTED_MS, "metrics": {"num_tokens": 400.0}})
            run.follow(stage).ship()
        return config, run

    return record


@pytest.mark.slow
def test_the_newest_rejection_run_on_the_data_is_the_baseline(recorded, data_report):
    recorded("1", 0.5, BEST_OF)
    _, baseline = recorded("2", 0.5, BEST_OF)
    recorded("3", 0.5, BEST_OF, GRPO | {"name": "second"})
    config, run = recorded("4", 0.9, GRPO)
    found = against_rejection(config, run.run_id, data_report.digest)
    assert (found.first.run_id, found.second.run_id) == (baseline.run_id, run.run_id)
    assert found.first.settings["stages.0.kind"] == "rejection"
    assert found.first.tokens == 400
    [accuracy] = [one for one in found.figures if one.name == "accuracy"]
    assert accuracy.difference == pytest.approx(accuracy.second - accuracy.first)
    assert against_rejection(config, run.run_id, "other data") is None


@pytest.mark.slow
def test_a_run_without_grpo_has_no_baseline(recorded, data_report):
    recorded("1", 0.5, BEST_OF)
    config, run = recorded("2", 0.5, BEST_OF)
    assert against_rejection(config, run.run_id, data_report.digest) is None


@pytest.mark.slow
def test_the_report_shows_the_baseline_or_says_that_there_is_none(recorded, results, data_report, tmp_path):
    assert "no run that trained on the same data by rejection sampling" in write_html(results, tmp_path).read_text()
    recorded("1", 0.5, BEST_OF)
    config, run = recorded("2", 0.9, GRPO)
    page = write_html(replace(results, baseline=against_rejection(config, run.run_id, data_report.digest)), tmp_path).read_text()
    assert "the cheap baseline. Both merged models on their" in page
    assert '<th class="n">rejection sampling</th><th class="n">this run</th>' in page
