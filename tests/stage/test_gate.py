"""The gate before a stage: pass@G of the policy that it starts from."""

from itertools import combinations

import polars as pl
import pytest
from pydantic import ValidationError

from grpo_tasks.stage.kept_prompts import pass_at_group, require_pass_at_group
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import DataError


def rates(*solved, samples=8, stage="s"):
    given = [(stage, None if count is None else count / samples, samples) for count in solved]
    return pl.DataFrame(given, schema={"stage": pl.String, "pass_rate": pl.Float64, "samples": pl.Int64}, orient="row")


def stage(**settings):
    given = {"name": "s", "rewards": ["format"], "num_generations": 4, "per_device_train_batch_size": 4}
    return StageConfig(**given | settings)


def by_counting(solved, samples, size):
    """Share of all choices of `size` samples that hold a solved one."""
    chosen = list(combinations(range(samples), size))
    return sum(min(each) < solved for each in chosen) / len(chosen)


@pytest.mark.parametrize("solved", range(9))
def test_it_is_the_share_of_groups_with_a_solved_completion(solved):
    assert pass_at_group(rates(solved), stage()) == pytest.approx(by_counting(solved, 8, 4))


def test_it_is_the_mean_over_the_prompts_that_were_measured():
    assert pass_at_group(rates(0, 8, None), stage()) == 0.5
    assert pass_at_group(rates(0, 8, stage="other"), stage()) is None


def test_fewer_samples_than_a_group_use_the_rate():
    assert pass_at_group(rates(1, samples=2), stage()) == pytest.approx(1 - 0.5**4)


def test_too_low_a_figure_stops_with_numbers_and_advice():
    with pytest.raises(
        DataError, match=r"pass@4 of the training prompts is 25.0%.*30.0%: 3 of 4 prompts are never solved"
    ) as caught:
        require_pass_at_group(rates(0, 0, 0, 8), stage(min_pass_at_group=0.3))
    assert "kind sft" in caught.value.fix
    require_pass_at_group(rates(0, 0, 0, 8), stage(min_pass_at_group=0.25))
    require_pass_at_group(rates(0, 0, 0, 0), stage())


@pytest.mark.parametrize("measured", [rates(None, None), rates(), rates(8, 8, stage="other")])
def test_a_gate_that_nothing_was_measured_for_stays_shut(measured):
    with pytest.raises(DataError, match=r"pass@4 of the training prompts is unknown.*10.0%") as caught:
        require_pass_at_group(measured, stage(min_pass_at_group=0.1))
    assert "measure_difficulty" in caught.value.fix
    require_pass_at_group(measured, stage())


DATA = {"train": [{"path": "embedded:arithmetic_train.jsonl"}]}
STAGE = {"rewards": ["format"]}
SFT = {"name": "a", "kind": "sft", "demonstrations": {"column": "solution"}}


def test_the_gate_needs_pass_rates_of_its_start_policy():
    gate = STAGE | {"name": "b", "min_pass_at_group": 0.2}
    with pytest.raises(ValidationError, match="measure_difficulty: true"):
        RunConfig(data=DATA, stages=[gate])
    with pytest.raises(ValidationError, match="measure_difficulty: true"):
        RunConfig(data=DATA, stages=[SFT, gate], difficulty={"samples": 8})
    RunConfig(data=DATA, stages=[gate], difficulty={"samples": 8})
    RunConfig(data=DATA, stages=[SFT, gate | {"measure_difficulty": True}], difficulty={"samples": 8})
