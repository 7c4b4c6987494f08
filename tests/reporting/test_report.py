"""The report of a run shows what its results say, and is safe to open whatever a model wrote."""

from dataclasses import replace

import polars as pl
import pytest

from grpo_tasks.reporting.report import costs_of, events_of, markdown, samples_of, write_html
from schemas.results.evaluation import DifficultyReport, StageDifficulty
from schemas.results.model import KeptPrompts
from tests.reporting.conftest import append
from tests.reporting.pages import assert_self_contained


@pytest.mark.slow
def test_the_page_is_self_contained_and_shows_untrusted_text_as_text(results, tmp_path):
    text = write_html(results, tmp_path).read_text()
    assert_self_contained(text)
    # System prompt, questions, completions and the rejected value.
    assert text.count("&lt;script&gt;") > 10


@pytest.mark.slow
def test_the_page_shows_the_decision_its_tests_and_the_rejected_rows(results, tmp_path):
    text = write_html(results, tmp_path).read_text()
    for shown in (
        "Promoted:",
        "against base",
        "+0.2500",
        "must not be worse than base",
        "train.jsonl:41",
        "grpo reproduce small/1",
    ):
        assert shown in text
    assert "No alarms or other events." in text


def test_answers_are_sorted_by_what_training_changed(results):
    by_kind = {kind.partition(":")[0]: [pair.prompt_id for pair in pairs] for kind, pairs in samples_of(results).items()}
    assert by_kind == {"Fixed": ["a"], "Broken": ["b"], "Still wrong": ["c"]}


def test_an_answer_is_shown_with_its_question_and_ground_truth(results):
    [pair] = samples_of(results)["Fixed: wrong before, right after"]
    assert pair.question.endswith("question a")
    assert (pair.answer, pair.before_verdict, pair.after_verdict) == ("4", "wrong", "right")
    assert pair.before.endswith("base a")
    assert pair.after.endswith("merged a")


def test_costs_add_up_and_what_was_not_measured_is_not_zero(results):
    *steps, total = costs_of(results)
    assert [cost.step for cost in steps] == [
        "validate_data", "probe_rewards", "evaluate_model base", "evaluate_model merged", "train_stage format", "merge_adapter",
    ]  # fmt: skip
    assert total.seconds == sum(cost.seconds for cost in steps)
    assert (total.tokens, total.gpu_hours, total.energy_wh) == (None, None, None)


def test_a_gpu_stage_costs_its_hours_energy_and_tokens(results, stage_dir):
    for step in (41, 42):
        measured = {"num_tokens": 1_000.0 * step, "energy": 1_800.0, "gpu_memory": 3.0}
        append(stage_dir.journal, {"step": step, "timestamp_ms": step, "metrics": measured})
    total = costs_of(results)[-1]
    assert total.tokens == 42_000
    assert total.energy_wh == pytest.approx(1.0)
    assert total.gpu_hours == pytest.approx(results.stages[0].seconds / 3600)


@pytest.mark.slow
def test_an_event_is_shown_with_its_stage_and_update(results, stage_dir, tmp_path):
    append(stage_dir.events, {"step": 12, "timestamp_ms": 1, "event": "kl_blow_up", "detail": "KL 3.2 is above 0.5"})
    [event] = events_of(results.stages[0])
    assert (event["stage"], event["step"]) == ("format", 12)
    assert "KL 3.2 is above 0.5" in write_html(results, tmp_path).read_text()


def test_the_summary_has_a_row_per_model_and_per_step(results):
    text = markdown(results)
    assert "| base | 50.0 % | 50.0 % | 50.0 % | 50.0 % |" in text
    assert "| merged | 90.0 % |" in text
    assert "| train_stage format | 10.0 |  | no GPU | not measured |" in text
    assert "17 rows read, 1 rejected." in text


def test_without_ground_truths_answers_are_shown_by_their_change_in_reward(results):
    for report, gain in zip((results.evaluations[0], results.evaluations[-1]), (0.0, 1.0), strict=True):
        samples = pl.read_parquet(report.samples)
        rewards = pl.Series("reward", [gain * (position % 3 - 0.5) for position in range(samples.height)])
        samples.with_columns(pl.lit(None, dtype=pl.Boolean).alias("correct"), rewards).write_parquet(report.samples)
    by_kind = samples_of(results)
    assert list(by_kind) == ["Higher reward than before", "Lower reward than before"]
    assert by_kind["Higher reward than before"][0].before_verdict == "reward 0"
    assert by_kind["Lower reward than before"][0].after_verdict == "reward -0.5"


@pytest.mark.slow
def test_the_page_shows_pass_rates_and_left_out_prompts(results, stage_dir, tmp_path):
    hostile = "<script>alert('x')</script>"
    pl.DataFrame(
        {
            "source": "train.jsonl", "line": [7, 8], "question": hostile, "answer": ["4", None], "pass_rate": [0.0, 1.0],
            "reason": ["never_solved", "always_solved"], "frequent_answer": [hostile, None], "frequent_share": [0.75, None],
        }
    ).write_parquet(stage_dir.left_out)  # fmt: skip
    counts = {"prompts": 40, "kept": 10, "low": 0.1, "high": 0.9, "never_solved": 29, "below": 0, "above": 0, "always_solved": 1}
    stages = [stage.model_copy(update={"kept": KeptPrompts(**counts, unknown=0)}) for stage in results.stages]
    solved = StageDifficulty(
        stage="format", prompts=40, mean=None, never_solved=29, always_solved=1, histogram=[29, 1, 2, 3, 4, 1]
    )
    difficulty = DifficultyReport(
        key="d", directory=tmp_path, seconds=5.0, label="start", origin="measured", samples=8, success=0.8, stages=[solved]
    )
    run = replace(results, stages=stages, difficulty=difficulty)
    text = write_html(run, tmp_path).read_text()
    assert_self_contained(text)
    assert "Stage format: 10 of 40 prompts have a pass rate from 0.1 to 0.9; left out: 29 never solved, 1 always solved" in text
    for shown in (
        "train.jsonl:7",
        "never solved",
        "8 completions of each training prompt",
        "left_out.parquet of the stage lists all",
    ):
        assert shown in text
    assert "Stage format: 10 of 40 prompts" in markdown(run)
    assert "measure_difficulty" in [cost.step for cost in costs_of(run)]
