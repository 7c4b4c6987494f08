"""Evaluations that stop early: what their intervals still cover, and that promotions use common prompts and are no easier."""

import warnings

import numpy as np
import polars as pl
import pytest
from scipy import stats

from flows.steps import guard_inputs
from grpo_tasks.evaluation.guards import find_merge_loss, find_regressions
from grpo_tasks.evaluation.report import LEAST_PROMPTS, evaluate_samples, widest_half
from grpo_tasks.evaluation.statistics import compare, paired_test, promotion_test
from grpo_tasks.library import base_model, evaluate, load_data, make
from grpo_tasks.rollout.parts import stopping_places
from grpo_tasks.rollout.spec import chosen_rows
from grpo_tasks.steps.probe_rewards import probe_rewards
from schemas.config.completion import CompletionConfig
from schemas.config.evaluation import EvaluationConfig, PromotionConfig
from schemas.config.load import load_config
from schemas.errors import DataError, Notice
from schemas.prompts import GREEDY
from schemas.results.data import PromptsUsed
from schemas.results.evaluation import evaluation_section
from schemas.results.model import ModelRef
from schemas.results.publication import PublishedFacts
from tests.evaluation.test_score import RIGHT, Row

ROWS = [Row(f"{number:02}") for number in range(64)]


def used(number, stopped, looks=2):
    return PromptsUsed(section="evaluation", used=number, of=64, stopped=stopped, looks=looks, half_width=0.041, seconds=1.0)


@pytest.fixture
def evaluated(tmp_path):
    """Evaluate one completion for each of the first prompts; 1 is right, 0 wrong and without its format, - right and cut off."""

    def evaluate(outcomes, label="merged", **settings):
        directory = tmp_path / f"{label}-{len(outcomes)}"
        directory.mkdir(exist_ok=True)
        samples = {
            "prompt_id": [row.prompt_id for row in ROWS[: len(outcomes)]],
            "sample": [0] * len(outcomes),
            "completion": [RIGHT if one in "1-" else "nothing" for one in outcomes],
            "completion_tokens": [3] * len(outcomes),
            "finish_reason": ["length" if one == "-" else "stop" for one in outcomes],
        }
        pl.DataFrame(samples).write_parquet(directory / "samples.parquet")
        stopped = {"prompts_used": used(len(outcomes), "interval" if len(outcomes) < 64 else "all")} | settings
        return evaluate_samples(
            directory,
            key="",
            label=label,
            model=ModelRef(path="embedded:base"),
            prompts=ROWS,
            completion=CompletionConfig(),
            evaluation=EvaluationConfig(num_samples=1, greedy=False),
            **stopped,
        )

    return evaluate


def test_models_that_stopped_at_different_places_are_compared_on_their_common_prompts(evaluated):
    """On the common 32 nothing changed; ours is better on those that the base was never asked."""
    base, ours = evaluated("10" * 16, "base"), evaluated("10" * 16 + "1" * 32)
    for left, right in ((ours, base), (base, ours)):
        test = compare(left, right, metric="accuracy", alpha=0.05)
        assert (test.prompts, test.difference, test.better) == (32, 0.0, False)
    worse = evaluated("1" * 31 + "0" + "-" * 32, "worse")
    shape, cut = find_regressions(worse, evaluated("1" * 32, "base"), PromotionConfig(max_format_drop=0.03))
    assert (shape.ours, shape.theirs, shape.passed) == (31 / 32, 1.0, False)
    assert (cut.ours, cut.theirs, cut.passed) == (0.0, 0.0, True)
    loss = find_merge_loss(evaluated("0" * 8 + "1" * 24, "merged"), evaluated("1" * 64, "correctness"), "accuracy")
    assert (loss.ours, loss.theirs, loss.passed) == (24 / 32, 1.0, False)


def test_different_prompts_that_no_early_stop_explains_are_refused(evaluated):
    base, ours = evaluated("1" * 32, "base", prompts_used=None), evaluated("1" * 64, prompts_used=None)
    with pytest.raises(DataError, match="different prompts: 64 and 32, 32 in common"):
        compare(ours, base, metric="accuracy", alpha=0.05)


def test_the_level_of_a_promotion_is_divided_by_the_stopping_places(evaluated):
    """Five wins and no loss have p = 1/32, which is below 0.05 and above 0.025."""
    base, ours = evaluated("0" * 5 + "1" * 27, "base"), evaluated("1" * 32)
    test = promotion_test(ours, base, metric="accuracy", alpha=0.05)
    assert (test.p_value, test.looks, test.better) == (1 / 32, 2, False)
    whole = [report.model_copy(update={"prompts_used": None}) for report in (ours, base)]
    test = promotion_test(*whole, metric="accuracy", alpha=0.05)
    assert (test.looks, test.better) == (1, True)
    # By time alone: where it stops says nothing about the values.
    timed = [report.model_copy(update={"prompts_used": used(32, "time", looks=1)}) for report in (ours, base)]
    assert promotion_test(*timed, metric="accuracy", alpha=0.05).better


def test_the_publication_names_the_level_of_its_tests(evaluated):
    base, ours = evaluated("0" * 16 + "1" * 16, "base"), evaluated("1" * 32)
    tests = [promotion_test(ours, base, metric="accuracy", alpha=0.05)]
    facts = PublishedFacts(model_name="m", model_version="1", champion=True, tests=tests, regressions=[], reason="r")
    assert facts.sections(0.05)[0].columns[0] == "paired test, alpha 0.025"


def test_wherever_equal_models_are_compared_no_more_than_alpha_are_promoted():
    """The worst rule there is: stop where the new model looks best. At the plain level it promotes twice as many."""
    random, places, promoted = (
        np.random.default_rng(3),
        stopping_places(256, LEAST_PROMPTS),
        {1: 0, len(stopping_places(256, 32)): 0},
    )
    for _ in range(400):
        ours, theirs = (random.binomial(1, 0.4, 256).astype(float) for _ in range(2))
        least = min(paired_test(ours[:n], theirs[:n], alpha=0.05, metric="m", against="a").p_value for n in places)
        for looks in promoted:
            promoted[looks] += least <= 0.05 / looks
    plain, divided = promoted.values()
    assert divided / 400 <= 0.05
    assert plain / 400 > 0.06


@pytest.mark.parametrize("rate", [0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98])
def test_an_interval_where_sampling_stopped_covers_at_least_nine_times_in_ten(rate):
    """1,000 evaluations of 256 prompts with four samples; normal intervals, widened as `rate_interval` does."""
    random, places = np.random.default_rng(5), stopping_places(256, LEAST_PROMPTS)
    values = random.binomial(4, random.beta(2 * rate, 2 * (1 - rate), (1_000, 256))) / 4
    for width in (0.03, 0.05, 0.08):
        low, high = np.zeros(1_000), np.ones(1_000)
        for number in reversed(places):
            mean, spread = values[:, :number].mean(1), values[:, :number].std(1) / number**0.5
            bound = 0.025 ** (1 / number)
            found_low = np.minimum(mean - stats.norm.ppf(0.975) * spread, bound)
            found_high = np.maximum(mean + stats.norm.ppf(0.975) * spread, 1 - bound)
            stops = ((found_high - found_low) / 2 <= width) | (number == 256)
            low, high = np.where(stops, found_low, low), np.where(stops, found_high, high)
        assert ((low <= rate) & (rate <= high)).mean() >= 0.9


def test_the_widest_interval_decides_and_rewards_do_not(evaluated):
    def half(outcomes, rows):
        samples = pl.read_parquet(evaluated(outcomes).samples)
        return widest_half(samples, prompts=rows, completion=CompletionConfig(), evaluation=EvaluationConfig())

    assert half("1" * 32, ROWS) == pytest.approx((1 - 0.025 ** (1 / 32)) / 2)
    # As accurate, but nobody knows how often it is cut off.
    assert half("1-" * 16, ROWS) > 0.15
    assert half("1" * 32, [Row(row.prompt_id, ()) for row in ROWS]) is None


def test_the_section_says_how_many_prompts_were_used_and_why(evaluated):
    text = evaluation_section([evaluated("01" * 16, "base"), evaluated("1" * 64)]).text
    assert text.startswith("32 to 64 held-out prompts, 1 samples each")
    assert "base: 32 of 64 prompts were sampled: the interval is within 4.1 points (evaluation.max_half_width)." in text
    assert "merged:" not in text
    report = (evaluated("01" * 16, "base").directory / "report.md").read_text()
    assert "32 of 64 prompts were sampled" in report


def test_a_summary_begins_with_the_metric_that_decides(evaluated):
    config = load_config("demo", ["evaluation.evaluators={short: 'mine:short'}", "promotion.metric=rewards/short/mean"])
    report = evaluated("10")
    scored = report.model_copy(update={"metrics": report.metrics | {"rewards/short/mean": report.metrics["accuracy"]}})
    assert evaluation_section([scored], first=config.figures).columns[:3] == ("model", "rewards/short/mean", "format rate")


def test_the_guards_of_a_promotion_use_all_their_prompts():
    limits = ["evaluation.max_half_width=0.05", "evaluation.max_minutes=3"]
    guard = {"name": "few", "data": [{"path": "rows.jsonl"}], "metric": "accuracy", "max_drop": 0.1}
    config = load_config("demo", limits)
    config = config.model_copy(update={"promotion": PromotionConfig(guards=[guard])})
    [(given, *_)] = guard_inputs(config, "base", ModelRef(path="embedded:base"), [None])
    assert (config.evaluation.max_half_width, config.evaluation.max_minutes) == (0.05, 3.0)
    assert (given.evaluation.max_half_width, given.evaluation.max_minutes) == (None, None)


@pytest.mark.long
def test_steps_sample_no_more_than_they_need_and_say_so(tmp_path):
    """The lab's forecast and the evaluation of the embedded model, whose intervals are narrow after the first part."""
    settings = ["data.train.0.max_rows=60", "data.eval.0.max_rows=60", "evaluation.num_samples=1", "evaluation.greedy=true"]
    limits = ["evaluation.max_half_width=0.3", "lab.max_half_width=0.45", "lab.num_rows=2", "stages.0.num_generations=2"]
    config = load_config("demo", [*settings, *limits, "rollout.max_completion_length=24", "resources.num_threads=1"])
    data = load_data(config, tmp_path / "data")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", Notice)
        report = evaluate(config, base_model(config), data, tmp_path / "evaluation")
        lab = make(probe_rewards, tmp_path / "lab", config, base_model(config), data)
    assert [str(one.message).partition(":")[0] for one in said if "prompts were sampled" in str(one.message)] == [
        "32 of 60 prompts were sampled",
        "8 of 16 prompts were sampled",
    ]
    assert (report.prompts, report.prompts_used.stopped, report.prompts_used.looks) == (32, "interval", 2)
    samples = pl.read_parquet(report.samples)
    asked = [row.prompt_id for row in chosen_rows(data.eval, None)][:32]
    assert samples["prompt_id"].to_list() == asked + asked
    assert samples["sample"].to_list() == [0] * 32 + [GREEDY] * 32
    assert (lab.prompts_used.used, lab.prompts_used.section, lab.forecasts[0].groups) == (8, "lab", 8)
    assert "8 of 16 prompts were sampled" in (lab.directory / "report.md").read_text()
    assert not list(tmp_path.glob("*/parts"))
