"""What measured pass rates do: a stage trains on the prompts in its band, and starts if its policy solves enough of them."""

from itertools import combinations

import polars as pl
import pytest
from pydantic import ValidationError

from grpo_tasks.data.table import read_prompts
from grpo_tasks.stage.kept_prompts import choose_prompts, pass_at_group, require_pass_at_group, require_prompts
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import DataError
from schemas.tables import LeftOut, StagePrompts

RATES = {"a": 0.0, "b": 0.0, "c": 0.125, "d": 0.5, "e": 0.875, "f": 1.0, "g": None}


def hexed(name):
    return name * 16 if name != "g" else "9" * 16


@pytest.fixture
def train(tmp_path):
    rows = [
        {"prompt_id": hexed(name), "source": "mine.jsonl", "line": line, "prompt": [{"role": "user", "content": f"{name}?"}],
         "answer": "4", "answers": None, "task": "", "prompt_tokens": 9, "extra": "{}"}
        for line, name in enumerate(RATES, start=1)
    ]  # fmt: skip
    types = {"answers": pl.List(pl.String)}
    pl.DataFrame(rows, schema_overrides=types).write_parquet(tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def table(stage="s", rates=RATES):
    return pl.DataFrame(
        {
            "stage": stage,
            "prompt_id": [hexed(name) for name in rates],
            "pass_rate": list(rates.values()),
            "pass_rate_low": [None if rate is None else max(0.0, rate - 0.1) for rate in rates.values()],
            "pass_rate_high": [None if rate is None else min(1.0, rate + 0.1) for rate in rates.values()],
            "samples": 8,
            "frequent_answer": ["5", "6", "4", "4", "4", "4", None],
            "frequent_share": [0.25, 0.75, 0.5, 0.5, 0.5, 1.0, None],
        }
    )


def stage(band=None, **settings):
    return StageConfig(name="s", rewards=["correctness"], keep_pass_rate=band, **settings)


def lines(frame):
    return frame["line"].to_list()


def test_both_bounds_belong_to_the_band_and_unknown_rates_are_kept(train):
    choice = choose_prompts(train, table(), stage([0.125, 0.875]))
    assert lines(choice.kept) == [3, 4, 5, 7]
    counts = choice.counts
    assert (counts.prompts, counts.kept, counts.left_out, counts.unknown) == (7, 4, 3, 1)
    assert (counts.never_solved, counts.below, counts.above, counts.always_solved) == (2, 0, 0, 1)
    assert counts.summary() == (
        "4 of 7 prompts have a pass rate from 0.125 to 0.875; left out: 2 never solved, 1 always solved; "
        "1 without a pass rate are kept"
    )


def test_likely_wrong_answers_come_first_among_those_left_out(train):
    left_out = LeftOut.validate(choose_prompts(train, table(), stage([0.3, 0.6])).left_out)
    assert left_out.select("line", "reason", "frequent_answer").rows() == [
        (2, "never_solved", "6"),
        (1, "never_solved", "5"),
        (6, "always_solved", "4"),
        (3, "below", "4"),
        (5, "above", "4"),
    ]


def test_a_stage_without_a_band_keeps_every_row_with_its_pass_rate(train, tmp_path):
    choice = choose_prompts(train, table(), stage())
    directory = StageDir(tmp_path)
    StagePrompts.validate(pl.read_parquet(choice.write(directory)))
    rows = read_prompts(directory.train)
    assert [row.pass_rate for row in rows] == list(RATES.values())
    assert (rows[3].pass_rate_low, rows[3].pass_rate_high) == (0.4, 0.6)
    assert pl.read_parquet(directory.left_out).is_empty()


def test_only_the_rates_of_the_stage_count(train):
    both = pl.concat([table(), table("other", dict.fromkeys(RATES, 0.5))])
    assert choose_prompts(train, both, stage([0.4, 0.6])).counts.kept == 2
    assert choose_prompts(train, table("other"), stage([0.4, 0.6])).counts.unknown == 7


def test_too_few_prompts_stop_with_the_numbers_and_a_fix(train):
    wanted = stage([0.3, 0.6], num_generations=2, per_device_train_batch_size=8)
    counts = choose_prompts(train, table(), wanted).counts
    with pytest.raises(DataError) as refused:
        require_prompts(counts, wanted)
    assert "2 of 7 prompts have a pass rate from 0.3 to 0.6" in refused.value.message
    assert "2 never solved" in refused.value.message
    assert "the stage needs 4" in refused.value.message
    assert refused.value.place == "stage s, keep_pass_rate"
    assert "difficulty.min_prompts: 2" in refused.value.fix
    require_prompts(counts, wanted, min_prompts=2)
    with pytest.raises(DataError):
        require_prompts(counts, wanted, min_prompts=3)


def test_a_stage_without_a_band_is_never_refused(train):
    counts = choose_prompts(train, table(), stage()).counts
    require_prompts(counts, stage(), min_prompts=1_000)


def rates(*solved, samples=8, stage="s"):
    given = [(stage, None if count is None else count / samples, samples) for count in solved]
    return pl.DataFrame(given, schema={"stage": pl.String, "pass_rate": pl.Float64, "samples": pl.Int64}, orient="row")


def gated(**settings):
    return stage(**{"num_generations": 4, "per_device_train_batch_size": 4} | settings)


def by_counting(solved, samples, size):
    """Share of all choices of `size` samples that hold a solved one."""
    chosen = list(combinations(range(samples), size))
    return sum(min(each) < solved for each in chosen) / len(chosen)


@pytest.mark.parametrize("solved", [0, 1, 4, 8])
def test_it_is_the_share_of_groups_with_a_solved_completion(solved):
    assert pass_at_group(rates(solved), gated()) == pytest.approx(by_counting(solved, 8, 4))


def test_it_is_the_mean_over_the_prompts_that_were_measured():
    assert pass_at_group(rates(0, 8, None), gated()) == 0.5
    assert pass_at_group(rates(0, 8, stage="other"), gated()) is None


def test_fewer_samples_than_a_group_use_the_rate():
    assert pass_at_group(rates(1, samples=2), gated()) == pytest.approx(1 - 0.5**4)


def test_too_low_a_figure_stops_with_numbers_and_advice():
    with pytest.raises(
        DataError, match=r"pass@4 of the training prompts is 25.0%.*30.0%: 3 of 4 prompts are never solved"
    ) as caught:
        require_pass_at_group(rates(0, 0, 0, 8), gated(min_pass_at_group=0.3))
    assert "kind sft" in caught.value.fix
    require_pass_at_group(rates(0, 0, 0, 8), gated(min_pass_at_group=0.25))
    require_pass_at_group(rates(0, 0, 0, 0), gated())


@pytest.mark.parametrize("measured", [rates(None, None), rates(), rates(8, 8, stage="other")])
def test_a_gate_that_nothing_was_measured_for_stays_shut(measured):
    with pytest.raises(DataError, match=r"pass@4 of the training prompts is unknown.*10.0%") as caught:
        require_pass_at_group(measured, gated(min_pass_at_group=0.1))
    assert "measure_difficulty" in caught.value.fix
    require_pass_at_group(measured, gated())


DATA = {"train": [{"path": "embedded:arithmetic_train.jsonl"}]}
SFT = {"name": "a", "kind": "sft", "demonstrations": {"column": "solution"}}


def test_the_gate_needs_pass_rates_of_its_start_policy():
    gate = {"name": "b", "rewards": ["format"], "min_pass_at_group": 0.2}
    with pytest.raises(ValidationError, match="measure_difficulty: true"):
        RunConfig(data=DATA, stages=[gate])
    with pytest.raises(ValidationError, match="measure_difficulty: true"):
        RunConfig(data=DATA, stages=[SFT, gate], difficulty={"samples": 8})
    RunConfig(data=DATA, stages=[gate], difficulty={"samples": 8})
    RunConfig(data=DATA, stages=[SFT, gate | {"measure_difficulty": True}], difficulty={"samples": 8})
