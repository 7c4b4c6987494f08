"""The report of a run shows what its results say, and is safe to open whatever a model wrote."""

import json
import re
from dataclasses import replace

import polars as pl
import pytest

from grpo_tasks.report import RunResults, against_rejection, costs_of, markdown, samples_of, write_html
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.runs import open_run
from schemas.results.evaluation import DifficultyReport, PairedTest, Regression, StageDifficulty
from schemas.results.model import KeptPrompts
from schemas.results.publication import PublishedFacts
from tests.tracking.conftest import (  # noqa: F401 - fixtures
    STARTED_MS,
    base_answers,
    data_report,
    database,
    empty_database,
    lab_report,
    make_config,
    make_evaluation,
    make_merge,
    make_stage,
)
from tests.web_pages import assert_self_contained

HOSTILE = "5 % of <script>alert('x')</script>"
NBSP = "\N{NO-BREAK SPACE}"
SAVED = f"float16 (keeps 98.7{NBSP}% of what training changed)"
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
    questions = [[{"role": "user", "content": f"{HOSTILE} question {prompt_id}"}] for prompt_id in BEFORE]
    held_out = {"prompt_id": list(BEFORE), "prompt": questions, "answer": ["4"] * len(BEFORE)}
    pl.DataFrame(held_out).write_parquet(data_report.eval)
    rejected = {"source": "train.jsonl", "line": 41, "rule": "answer_missing", "meaning": "the answer is empty"}
    pl.DataFrame([rejected | {"value": HOSTILE + 'api_key = "secret-word 7"'}]).write_parquet(
        data_report.directory / "quarantine.parquet"
    )
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
            write_samples(make_evaluation("format", 0.85, key="3" * 16), AFTER),
            write_samples(make_evaluation("merged", 0.9, key="2" * 16), AFTER),
        ],
        stages=[make_stage(config)],
        proof=make_merge(),
        decision=PublishedFacts(
            model_name="small", model_version="1", champion=True, tests=[test], regressions=[check], reason="better than the base"
        ),
    )


@pytest.fixture
def stage_dir(results):
    """The directory of the run's only stage."""
    return StageDir(results.stages[0].directory)


def append(path, line):
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.mark.slow
def test_the_page_shows_the_decision_and_untrusted_text_as_text(results, stage_dir, tmp_path):
    assert "No alarms or other events." in write_html(results, tmp_path).read_text()
    append(stage_dir.events, {"step": 12, "timestamp_ms": 1, "event": "kl_blow_up", "detail": "KL 3.2 is above 0.5"})
    text = write_html(results, tmp_path).read_text()
    assert_self_contained(text)
    # System prompt, questions, completions and the rejected value.
    assert text.count("&lt;script&gt;") > 10
    assert "api_key" in text
    assert "secret-word" not in text, "it is hidden before its quotes are escaped"
    decision = ("Promoted:", "against base", "+0.2500", "must not be worse than base", "grpo reproduce small/1")
    for shown in (
        *decision,
        "train.jsonl:41",
        f"90.0{NBSP}%\n(85.0 to 95.0)",
        f"The rows format and merged are the same policy: with its adapter, and merged in {SAVED}",
        '<td>format</td><td class="n">12</td><td>KL 3.2 is above 0.5</td>',
    ):
        assert shown in text
    assert "no run that trained on the same data by rejection sampling" in text
    verbatim = re.findall(r"<(?:pre|code)>.*?</(?:pre|code)>", text, re.DOTALL)
    assert any("5 % of" in one for one in verbatim), "a system prompt stays as it was written"
    assert not re.search(r"\d %", re.sub(r"(?s)<(pre|code)>.*?</\1>", "", text))


def test_answers_are_sorted_by_what_training_changed_with_their_question(results):
    found = samples_of(results)
    by_kind = {kind.partition(":")[0]: [pair.prompt_id for pair in pairs] for kind, pairs in found.items()}
    assert by_kind == {"Fixed": ["a"], "Broken": ["b"], "Still wrong": ["c"]}
    [pair] = found["Fixed: wrong before, right after"]
    assert pair.question.endswith("question a")
    assert (pair.truth, pair.first.verdict, pair.second.verdict) == ("4", "wrong", "right")
    assert pair.first.text.endswith("base a")
    assert pair.second.text.endswith("merged a")


def test_without_ground_truths_answers_are_shown_by_their_change_in_reward(results):
    for report, gain in zip((results.evaluations[0], results.evaluations[-1]), (0.0, 1.0), strict=True):
        samples = pl.read_parquet(report.samples)
        rewards = pl.Series("reward", [gain * (position % 3 - 0.5) for position in range(samples.height)])
        samples.with_columns(pl.lit(None, dtype=pl.Boolean).alias("correct"), rewards).write_parquet(report.samples)
    by_kind = samples_of(results)
    assert list(by_kind) == ["Higher reward than before", "Lower reward than before"]
    assert by_kind["Higher reward than before"][0].first.verdict == "reward 0"
    assert by_kind["Lower reward than before"][0].second.verdict == "reward -0.5"


def test_costs_add_up_and_what_was_not_measured_is_not_zero(results, stage_dir):
    *steps, total = costs_of(results)
    assert [cost.step for cost in steps] == [
        "validate_data", "probe_rewards", "evaluate_model base", "evaluate_model format", "evaluate_model merged",
        "train_stage format", "merge_adapter",
    ]  # fmt: skip
    assert total.seconds == sum(cost.seconds for cost in steps)
    assert (total.tokens, total.gpu_hours, total.energy_wh) == (None, None, None)
    for step in (41, 42):
        measured = {"num_tokens": 1_000.0 * step, "energy": 1_800.0, "gpu_memory": 3.0}
        append(stage_dir.journal, {"step": step, "timestamp_ms": step, "metrics": measured})
    total = costs_of(results)[-1]
    assert (total.tokens, total.energy_wh) == (42_000, pytest.approx(1.0))
    assert total.gpu_hours == pytest.approx(results.stages[0].seconds / 3600)


def test_the_summary_has_a_row_per_model_and_per_step(results):
    text = markdown(replace(results, sections={"count_words": "7 words"}))
    assert text.startswith("# t-")
    assert "| base | 50.0 % (45.0 to 55.0) | 50.0 % (45.0 to 55.0) |" in text
    assert "| merged | 90.0 % (85.0 to 95.0) |" in text
    assert f"merged in {SAVED.replace(NBSP, ' ')}. They differ by rounding alone" in text
    assert "| train_stage format | 10.0 |  | no GPU | not measured |" in text
    assert "17 rows read, 1 rejected.\n\ncount_words: 7 words\n\n| step |" in text


@pytest.mark.slow
def test_the_page_shows_pass_rates_and_left_out_prompts(results, stage_dir, tmp_path):
    pl.DataFrame(
        {
            "source": "train.jsonl", "line": [7, 8], "question": HOSTILE, "answer": ["4", None], "pass_rate": [0.0, 1.0],
            "reason": ["never_solved", "always_solved"], "frequent_answer": [HOSTILE, None], "frequent_share": [0.75, None],
        }
    ).write_parquet(stage_dir.left_out)  # fmt: skip
    counts = {"prompts": 40, "kept": 10, "low": 0.1, "high": 0.9, "never_solved": 29, "below": 0, "above": 0, "always_solved": 1}
    stages = [stage.model_copy(update={"kept": KeptPrompts(**counts, unknown=0)}) for stage in results.stages]
    histogram = [29, 1, 2, 3, 4, 1]
    solved = StageDifficulty(stage="format", prompts=40, mean=None, never_solved=29, always_solved=1, histogram=histogram)
    known = {"label": "start", "origin": "measured", "samples": 8, "success": 0.8, "stages": [solved]}
    run = replace(results, stages=stages, difficulty=DifficultyReport(key="d", directory=tmp_path, seconds=5.0, **known))
    text = write_html(run, tmp_path).read_text()
    assert_self_contained(text)
    assert "Stage format: 10 of 40 prompts have a pass rate from 0.1 to 0.9; left out: 29 never solved, 1 always solved" in text
    shown = ("train.jsonl:7", "never solved", "8 completions of each training prompt", "left_out.parquet of the stage lists all")
    assert [words for words in shown if words not in text] == []
    assert "Stage format: 10 of 40 prompts" in markdown(run)
    assert "measure_difficulty" in [cost.step for cost in costs_of(run)]


BEST_OF = {"name": "format", "kind": "rejection", "rewards": ["format"], "max_steps": 4}
GRPO = {"name": "format", "rewards": ["correctness"], "max_steps": 4}


@pytest.mark.slow
def test_the_newest_rejection_run_on_the_data_is_the_baseline(
    database, make_config, make_stage, make_evaluation, data_report, results, tmp_path  # noqa: F811
):  # fmt: skip
    def record(key, accuracy, *stages):
        config = make_config(database, stages=list(stages))
        with open_run(config, key=key) as run:
            run.record(data_report)
            run.record(make_evaluation("merged", accuracy, key=key * 16))
            stage = make_stage(config, key=key * 16, steps=4).directory
            append(StageDir(stage).journal, {"step": 5, "timestamp_ms": STARTED_MS, "metrics": {"num_tokens": 400.0}})
            run.follow(stage).ship()
        return config, run

    record("1", 0.5, BEST_OF)
    without_grpo, baseline = record("2", 0.5, BEST_OF)
    assert against_rejection(without_grpo, baseline.run_id, data_report.digest) is None
    record("3", 0.5, BEST_OF, GRPO | {"name": "second"})
    config, run = record("4", 0.9, GRPO)
    found = against_rejection(config, run.run_id, data_report.digest)
    assert (found.first.run_id, found.second.run_id) == (baseline.run_id, run.run_id)
    assert found.first.settings["stages.0.kind"] == "rejection"
    assert found.first.tokens == 400
    [accuracy] = [one for one in found.figures if one.name == "accuracy"]
    assert accuracy.difference == pytest.approx(accuracy.second - accuracy.first)
    assert against_rejection(config, run.run_id, "other data") is None
    page = write_html(replace(results, baseline=found), tmp_path).read_text()
    assert "the cheap baseline. The baseline took 400 tokens" in page
    assert "Both merged models on their" in page
    assert '<th class="n">rejection sampling</th><th class="n">this run</th>' in page
