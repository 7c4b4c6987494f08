"""How often each prompt is solved, from samples and from a column of the data."""

from dataclasses import dataclass, field

import polars as pl
import pytest
from scipy import stats

from grpo_tasks.evaluation.pass_rates import column_rates, measured_rates, summarise_rates, write_rates
from schemas.config.run import RunConfig
from schemas.errors import DataError
from schemas.results.evaluation import BINS, histogram
from schemas.tables import PassRates


@dataclass
class Row:
    prompt_id: str
    line: int = 1
    extra: dict = field(default_factory=dict)
    source: str = "mine.csv"
    truths: tuple = ("4",)
    messages: tuple = ({"role": "user", "content": "What is 2 + 2?"},)


def reply(answer):
    return f"<reasoning>x</reasoning><answer>{answer}</answer>"


def samples_of(**answers):
    rows = [(prompt, number, reply(answer)) for prompt, given in answers.items() for number, answer in enumerate(given)]
    return pl.DataFrame(rows, schema=["prompt_id", "sample", "completion"], orient="row")


SAMPLES = samples_of(never=[5, 5, 6, 5], half=[4, 4, 6, 7], always=[4, 4, 4, 4])
SOLVED = pl.DataFrame({"answers": [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]}, schema={"answers": pl.Float64})


def inputs_of(*stages):
    named = [{"name": name, "rewards": ["correctness"]} for name in stages]
    config = RunConfig(data={"train": [{"path": "rows.jsonl"}]}, stages=named, difficulty={"samples": 4})
    return config.difficulty_of(config.stages)


INPUTS = inputs_of("answers")


def rates_by_id(table):
    return {row["prompt_id"]: row for row in table.iter_rows(named=True)}


def test_a_pass_rate_has_wilsons_interval_and_the_most_frequent_answer():
    table = PassRates.validate(measured_rates(SAMPLES.hstack(SOLVED), INPUTS))
    found = rates_by_id(table)
    assert {name: row["pass_rate"] for name, row in found.items()} == {"never": 0.0, "half": 0.5, "always": 1.0}
    exact = stats.binomtest(2, 4).proportion_ci(0.95, method="wilson")
    assert (found["half"]["pass_rate_low"], found["half"]["pass_rate_high"]) == pytest.approx((exact.low, exact.high))
    assert found["never"]["pass_rate_low"] == 0.0
    assert 0.4 < found["never"]["pass_rate_high"] < 0.6
    assert (found["never"]["frequent_answer"], found["never"]["frequent_share"]) == ("5", 0.75)


def test_each_stage_has_its_rates_and_unjudged_completions_do_not_count():
    both = SOLVED.with_columns(other=pl.Series([None] * 4 + [1.0, None, None, None] + [0.0] * 4, dtype=pl.Float64))
    found = measured_rates(SAMPLES.hstack(both), inputs_of("answers", "other")).filter(stage="other")
    assert found.sort("prompt_id").select("prompt_id", "pass_rate", "samples").rows() == [
        ("always", 0.0, 4),
        ("half", 1.0, 1),
        ("never", None, 0),
    ]


def test_a_prompt_that_occurs_twice_is_counted_once():
    once = SAMPLES.hstack(SOLVED)
    twice = pl.concat([once, once.filter(prompt_id="half")])
    assert measured_rates(twice, INPUTS).equals(measured_rates(SAMPLES.hstack(SOLVED), INPUTS))


def test_a_histogram_counts_every_rate_once():
    assert histogram([0.0, 0.25, 0.26, 0.5, 0.75, 0.76, 0.99, 1.0]) == [1, 1, 2, 1, 2, 1]
    assert len(BINS) == 6


def test_rates_of_a_column_may_be_text_or_missing():
    rows = [Row("a", extra={"solve_rate": 0.5}), Row("b", extra={"solve_rate": "0.125"}), Row("c", extra={"solve_rate": None})]
    table = PassRates.validate(column_rates(rows, "solve_rate", ["one", "two"]))
    found = table.select("stage", "prompt_id", "pass_rate").rows()
    assert found == [(stage, *rate) for stage in ("one", "two") for rate in (("a", 0.5), ("b", 0.125))]


@pytest.mark.parametrize("value", [1.5, -0.1, "many", float("nan"), True, [0.5]])
def test_a_column_with_anything_else_is_refused_with_its_line(value):
    with pytest.raises(DataError) as refused:
        column_rates([Row("a", extra={"rate": 1}), Row("b", line=7, extra={"rate": value})], "rate", ["one"])
    assert refused.value.place == "mine.csv:7"
    assert "between 0 and 1" in refused.value.message
    assert refused.value.fix


def test_a_column_that_no_row_has_is_refused():
    with pytest.raises(DataError, match="no training row has the column rate"):
        column_rates([Row("a"), Row("b")], "rate", ["one"])


def test_the_report_lists_unsolved_prompts_with_their_answers(tmp_path):
    rows = [Row("never", line=3, truths=("<b>4</b>",)), Row("half"), Row("always")]
    table = measured_rates(SAMPLES.hstack(SOLVED), INPUTS)
    report = write_rates(table, rows, INPUTS, tmp_path, key="k", label="start")
    [stage] = report.stages
    assert (stage.prompts, stage.never_solved, stage.always_solved, stage.mean.value) == (3, 1, 1, 0.5)
    assert stage.mean.low < 0.5 < stage.mean.high
    text = (tmp_path / "report.md").read_text()
    assert "mine.csv:3" in text
    assert "`<b>4</b>`" in text
    assert "| `5` | 75% |" in text
    assert pl.read_parquet(report.pass_rates).equals(table)


def test_a_stage_without_any_known_rate_has_no_mean():
    unknown = SOLVED.with_columns(answers=pl.lit(None, dtype=pl.Float64))
    [stage] = summarise_rates(measured_rates(SAMPLES.hstack(unknown), INPUTS))
    assert (stage.prompts, stage.mean) == (0, None)
