"""Results of a small run, without a run: tables of a few rows, a recorded journal."""

import json

import polars as pl
import pytest

from grpo_tasks.reporting.report import RunResults
from grpo_tasks.stage.stage_dir import StageDir
from schemas.results.evaluation import PairedTest, Regression
from schemas.results.publication import PublishedFacts
from tests.tracking.conftest import (  # noqa: F401 - fixtures
    base_answers,
    data_report,
    lab_report,
    make_config,
    make_evaluation,
    make_merge,
    make_stage,
)

HOSTILE = "<script>alert('x')</script>"
BEFORE = {"a": False, "b": True, "c": False, "d": True}
"""Whether the base model answers each prompt right."""
AFTER = {"a": True, "b": False, "c": False, "d": True}
"""The same for the merged model."""


def write_samples(report, verdicts):
    """One sample and one greedy completion per prompt; the greedy one is always right."""
    rows = [
        {"prompt_id": prompt_id, "sample": sample, "completion": f"{HOSTILE} {report.label} {prompt_id}", "correct": right}
        for prompt_id, verdict in verdicts.items()
        for sample, right in ((0, verdict), (-1, True))
    ]
    pl.DataFrame(rows).write_parquet(report.samples)
    return report


@pytest.fixture
def results(make_config, make_stage, make_evaluation, make_merge, data_report, lab_report):  # noqa: F811
    """Everything that a report is made of; prompts, completions and rejected rows are hostile."""
    config = make_config("sqlite:///mlflow.db", data={"train": [{"path": "train.jsonl"}], "system_prompt": HOSTILE})
    pl.DataFrame(
        {
            "prompt_id": list(BEFORE),
            "prompt": [[{"role": "user", "content": f"{HOSTILE} question {prompt_id}"}] for prompt_id in BEFORE],
            "answer": ["4"] * len(BEFORE),
        }
    ).write_parquet(data_report.eval)
    rejected = {"source": "train.jsonl", "line": 41, "rule": "answer_missing", "meaning": "the answer is empty", "value": HOSTILE}
    pl.DataFrame([rejected]).write_parquet(data_report.directory / "quarantine.parquet")
    test = PairedTest(against="base", metric="accuracy", prompts=4, difference=0.25, p_value=0.01, better=True)
    check = Regression(metric="format_rate", against="base", ours=0.9, theirs=0.5, limit=0.45, passed=True)
    return RunResults(
        config=config,
        run_id="r" * 32,
        flow_run_id=None,
        data=data_report,
        lab=lab_report,
        evaluations=[
            write_samples(make_evaluation("base", 0.5, key="1" * 16), BEFORE),
            write_samples(make_evaluation("merged", 0.9, key="2" * 16), AFTER),
        ],
        stages=[make_stage(config)],
        proof=make_merge(),
        decision=PublishedFacts(
            model_name="small", model_version="1", champion=True, tests=[test], regressions=[check], reason="better than the base"
        ),
    )


def append(path, line):
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture
def stage_dir(results):
    """The directory of the run's only stage."""
    return StageDir(results.stages[0].directory)
