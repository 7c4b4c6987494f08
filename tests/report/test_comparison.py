"""The comparison of two past runs, on tables of a few rows."""

from dataclasses import replace

import polars as pl
import pytest
from jinja2 import UndefinedError

from flows.cli.models import show_comparison
from grpo_tasks.report import _render, compare_runs, write_comparison
from grpo_tasks.tracking.past_runs import PastRun
from schemas.metrics import KL, REWARD
from tests.web_pages import assert_self_contained

HOSTILE = "<script>alert('x')</script>"


def samples_of(verdicts):
    """One sampled and one greedy completion per prompt; the greedy one is always wrong."""
    rows = [
        {
            "prompt_id": prompt_id,
            "sample": sample,
            "completion": f"{HOSTILE} {prompt_id}",
            "strict_format": True,
            "correct": right,
            "lenient_correct": right,
            "truncated": False,
        }
        for prompt_id, verdict in verdicts.items()
        for sample, right in ((0, verdict), (-1, False))
    ]
    return pl.DataFrame(rows)


def past_run(name, verdicts, **settings):
    return PastRun(
        run_id=name * 8,
        name=name,
        settings={"seed": "0", "model.path": "embedded:base"} | settings,
        figures={},
        curves={"format": {REWARD: [(1, 0.1), (2, 0.4)], KL: [(1, 0.01)]}},
        samples=samples_of(verdicts),
        prompts={prompt_id: f"{HOSTILE} question {prompt_id}" for prompt_id in verdicts},
        data_digest="d" * 64,
        tokens=1000.0,
    )


FIRST = past_run("one", {"a": True, "b": False, "c": False, "d": True})
SECOND = past_run("two", {"a": True, "b": True, "c": True, "d": False}, seed="1", beta="0.04")


def difference(found, name):
    return next(row for row in found.figures if row.name == name)


def test_only_differing_settings_are_listed_with_dashes_for_missing():
    assert compare_runs(FIRST, SECOND).settings == [("beta", "-", "0.04"), ("seed", "0", "1")]


def test_a_difference_is_second_minus_first_over_the_sampled_completions():
    row, back = difference(compare_runs(FIRST, SECOND), "accuracy"), difference(compare_runs(SECOND, FIRST), "accuracy")
    assert (row.first, row.second, row.difference) == (0.5, 0.75, 0.25)
    assert row.low < row.difference < row.high
    assert back.difference == -row.difference
    assert (back.low, back.high) == pytest.approx((-row.high, -row.low), abs=0.3)
    equal = difference(compare_runs(FIRST, SECOND), "format_rate")
    assert (equal.difference, equal.low, equal.high) == (0.0, 0.0, 0.0)


def test_rewards_and_tasks_are_compared_where_both_runs_have_them():
    scores = pl.Series([1.0, 9.0, 2.0, 9.0, 3.0, 9.0, None, 9.0], dtype=pl.Float64)
    task = pl.Series(["sum", "sum", "sum", "sum", "tone", "tone", "tone", "tone"])
    columns = {"reward": scores, "rewards/brief/mean": scores, "task": task, "correct": pl.Series([None] * 8, dtype=pl.Boolean)}
    first = replace(FIRST, samples=FIRST.samples.with_columns(**columns))
    second = replace(SECOND, samples=SECOND.samples.with_columns(**(columns | {"reward": scores + 1.5})))
    found = {row.name: row for row in compare_runs(first, second).figures}
    assert (found["reward"].first, found["reward"].difference, found["reward"].share) == (2.0, 1.5, False)
    assert (found["reward/task/sum"].first, found["reward/task/tone"].first) == (1.5, 3.0)
    assert found["rewards/brief/mean"].difference == 0.0
    assert found["format_rate/task/tone"].share
    assert not any(name.startswith("accuracy") for name in found)
    assert "reward" not in {row.name for row in compare_runs(first, SECOND).figures}


def test_prompts_on_which_the_models_disagree_are_shown_with_both_verdicts():
    found = compare_runs(FIRST, SECOND).disagreements
    assert [(row.prompt_id, row.first.verdict, row.second.verdict) for row in found] == [
        ("b", "wrong", "right"), ("c", "wrong", "right"), ("d", "right", "wrong"),
    ]  # fmt: skip


def test_without_ground_truth_the_largest_reward_differences_are_shown(tmp_path):
    def judged(run, *scores):
        given = pl.Series([value for score in scores for value in (score, 9.0)], dtype=pl.Float64)
        return replace(run, samples=run.samples.with_columns(reward=given, correct=pl.lit(None, pl.Boolean)))

    found = compare_runs(judged(FIRST, 0.5, 0.25, 1.0, None), judged(SECOND, 0.5, 0.5, 0.0, 1.0))
    shown = [(row.prompt_id, row.first.verdict, row.second.verdict) for row in found.disagreements]
    assert shown == [("c", "reward 1", "reward 0"), ("b", "reward 0.25", "reward 0.5")]
    assert [row.second_is_better for row in found.disagreements] == [False, True]
    page = write_comparison(found, tmp_path / "page.html").read_text()
    assert "first, reward 1<" in page
    assert "second, reward 0.5<" in page
    assert "right" not in page.partition("Prompts on which the models disagree")[2].replace("bright", "")


def test_a_reward_is_printed_as_a_number_and_a_share_in_percent(capsys):
    scores = FIRST.samples.with_columns(reward=pl.lit(1.5))
    show_comparison(compare_runs(replace(FIRST, samples=scores), replace(SECOND, samples=scores)))
    lines = {line.split("\t")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "1.500" in lines["reward"]
    assert "%" not in lines["reward"]
    assert "50.0 %" in lines["accuracy"]


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"model.merged_dtype": "bfloat16"}, True),
        ({"model.merged_dtype": "bfloat16", "resources.num_threads": "1"}, True),
        ({"model.merged_dtype": "bfloat16", "seed": "1"}, False),
        ({"seed": "1"}, False),
    ],
    ids=str,
)
def test_runs_that_differ_by_rounding_alone_say_so(capsys, changed, same):
    settings = {"model.merged_dtype": "float32", "resources.num_threads": "2", "seed": "0"}
    found = compare_runs(replace(FIRST, settings=settings), replace(SECOND, settings=settings | changed))
    show_comparison(found)
    assert ("they differ by rounding alone" in capsys.readouterr().out) == same
    other = replace(found, second=replace(found.second, data_digest="e" * 64))
    assert "rounding" not in other.section("first", "second").text


@pytest.mark.slow
def test_only_common_prompts_are_compared_and_none_is_said(tmp_path):
    found = compare_runs(FIRST, past_run("two", {"a": False, "z": True}))
    assert found.prompts == 1
    assert difference(found, "accuracy").difference == -1.0
    found = compare_runs(FIRST, past_run("two", {"z": True}))
    assert (found.prompts, found.figures, found.disagreements) == (0, [], [])
    assert "no paired differences" in write_comparison(found, tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_the_page_is_self_contained_and_repeatable(tmp_path):
    long = replace(SECOND, prompts=SECOND.prompts | {"b": "x" * 1_501})
    first = write_comparison(compare_runs(FIRST, long), tmp_path / "first.html")
    second = write_comparison(compare_runs(FIRST, long), tmp_path / "second.html")
    text = first.read_text()
    assert text == second.read_text()
    assert_self_contained(text)
    assert "&lt;script&gt;" in text
    assert f"{'x' * 1_500} ..." in text
    assert "The runs used different data" not in text
    assert {path.name for path in tmp_path.iterdir()} == {"first.html", "second.html"}


def test_a_value_that_the_page_needs_and_nobody_gave_is_an_error():
    found = compare_runs(FIRST, SECOND)
    with pytest.raises(UndefinedError, match="'curves' is undefined"):
        _render("comparison.html", comparison=found, first=found.first, second=found.second, colours=["red", "blue"])


@pytest.mark.slow
def test_other_data_are_marked_and_stages_of_one_run_drawn(tmp_path):
    other = replace(SECOND, data_digest="e" * 64, curves={"correctness": {REWARD: [(1, 1.0)]}})
    text = write_comparison(compare_runs(FIRST, other), tmp_path / "page.html").read_text()
    assert "The runs used different data" in text
    assert "data:image/png" in text
