"""Figures of an evaluation: what is right, what is left out, rewards and tasks; and which of them decides."""

import json
from dataclasses import dataclass

import polars as pl
import pytest
from pydantic import ValidationError
from scipy import stats

from grpo_tasks.evaluation.guards import find_merge_loss, find_regressions
from grpo_tasks.evaluation.report import evaluate_samples
from grpo_tasks.evaluation.statistics import compare, deciding_metric
from schemas.config.completion import CompletionConfig
from schemas.config.evaluation import EvaluationConfig, PromotionConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, DataError
from schemas.results.model import ModelRef

RIGHT = "<reasoning>w</reasoning><answer>42</answer>"


@dataclass(frozen=True)
class Row:
    prompt_id: str
    truths: tuple[str, ...] = ("42",)
    task: str = ""


@pytest.fixture
def evaluated(tmp_path):
    """Evaluate one completion per prompt."""

    def evaluate(rows, texts, *, label="merged", completion=None, faults=None, tokens=3, **rewards):
        directory = tmp_path / label
        directory.mkdir(exist_ok=True)
        samples = {"prompt_id": [row.prompt_id for row in rows], "sample": [0] * len(rows), "completion": texts}
        more = {"completion_tokens": [tokens] * len(rows), "finish_reason": ["stop"] * len(rows)}
        more |= {} if faults is None else {"conversation": list(map(fault, faults))}
        pl.DataFrame(samples | more).write_parquet(directory / "samples.parquet")
        return evaluate_samples(
            directory,
            key="",
            label=label,
            model=ModelRef(path="embedded:base"),
            prompts=rows,
            completion=completion or CompletionConfig(),
            evaluation=EvaluationConfig(num_samples=1, greedy=False),
            rewards=pl.DataFrame(rewards, schema=dict.fromkeys(rewards, pl.Float64)) if rewards else None,
        )

    return evaluate


def fault(error=None):
    """The column `conversation` of a completion."""
    return json.dumps({"prompt": [], "turns": [], "ending": "error" if error else "done", "error": error, "reward": None})


def values(report):
    return {name: interval.value for name, interval in report.metrics.items()}


def test_any_of_several_ground_truths_is_right(evaluated):
    found = values(evaluated([Row("a", ("41", "42")), Row("b", ("41",))], [RIGHT, RIGHT]))
    assert (found["accuracy"], found["lenient_accuracy"], found["pass_at_k"]) == (0.5, 0.5, 0.5)


def test_accuracy_is_the_mean_over_rows_with_a_ground_truth(evaluated):
    report = evaluated([Row("a"), Row("b", ()), Row("c", ("41",))], [RIGHT] * 3)
    assert values(report)["accuracy"] == 0.5
    assert values(report)["format_rate"] == 1.0
    assert "the 2 prompts with a ground truth" in (report.directory / "report.md").read_text()


def test_without_ground_truth_there_is_no_accuracy(evaluated):
    report = evaluated([Row("a", ()), Row("b", ())], ["good <b>day</b>", "bad day"], reward=[1.0, -1.0])
    assert report.metrics.keys() == {"format_rate", "truncated_rate", "mean_length", "reward"}
    assert report.pass_at_k == {}
    text = (report.directory / "report.md").read_text()
    assert "there is no accuracy" in text
    assert text.index("good <b>day") < text.index("bad day")


def test_free_text_has_no_format_rate_and_no_regression_in_it(evaluated):
    free = CompletionConfig(format="none")
    ours, base = (evaluated([Row("a")], ["text"], label=label, completion=free) for label in ("merged", "base"))
    assert "format_rate" not in ours.metrics
    assert [check.metric for check in find_regressions(ours, base, PromotionConfig())] == ["truncated_rate"]


@pytest.mark.parametrize(
    ("lost", "won", "passed"), [(0, 0, True), (5, 0, True), (6, 0, False), (7, 2, True), (9, 1, False), (0, 9, True)]
)
def test_a_merge_may_lose_no_more_than_chance_explains(evaluated, lost, won, passed):
    """The exact McNemar test by hand: 5 losses alone have p = 2^-5 = 0.031, 6 have 0.016; the level is 0.025."""
    rows, wrong = [Row(f"{number:02}") for number in range(40)], "nothing"
    policy = evaluated(rows, [RIGHT] * (40 - won) + [wrong] * won, label="correctness")
    merged = evaluated(rows, [wrong] * lost + [RIGHT] * (40 - lost))
    check = find_merge_loss(merged, policy, "accuracy")
    assert check.passed is passed
    assert check.p_value == pytest.approx(stats.binomtest(lost, max(1, lost + won), 0.5, alternative="greater").pvalue)
    assert (check.ours, check.theirs, check.against) == ((40 - lost) / 40, (40 - won) / 40, "correctness")


def test_rewards_have_means_and_intervals_where_they_apply(evaluated):
    rewards = {"reward": [1.0, 4.0, None], "rewards/brief/mean": [None, 0.5, None], "rewards/never/mean": [None] * 3}
    report = evaluated([Row("a"), Row("b"), Row("c")], [RIGHT] * 3, **rewards)
    assert (values(report)["reward"], values(report)["rewards/brief/mean"]) == (2.5, 0.5)
    assert "rewards/never/mean" not in report.metrics
    assert report.metrics["reward"].low < 2.5 < report.metrics["reward"].high
    assert "| rewards/brief/mean" in (report.directory / "report.md").read_text()


@pytest.mark.parametrize(("verdict", "low", "high"), [(0.0, 0.0, 1 - 0.025 ** (1 / 20)), (1.0, 0.025 ** (1 / 20), 1.0)])
def test_the_same_verdict_on_every_prompt_has_an_interval(evaluated, verdict, low, high):
    """Clopper-Pearson's for no, and for only, successes in 20 trials; a score of any other size has none."""
    rewards = {"rewards/kept/mean": [verdict] * 20, "rewards/brief/mean": [0.5] * 20}
    found = evaluated([Row(f"{number:02}") for number in range(20)], [RIGHT] * 20, **rewards).metrics
    assert (found["rewards/kept/mean"].low, found["rewards/kept/mean"].high) == pytest.approx((low, high))
    assert (found["rewards/brief/mean"].low, found["rewards/brief/mean"].high) == (0.5, 0.5)


def test_a_conversation_that_failed_is_wrong_and_is_never_left_out(evaluated):
    rows = [Row("a"), Row("b"), Row("c"), Row("d", ())]
    report = evaluated(rows, [RIGHT] * 4, faults=[None, "step hung", None, "step hung"], reward=[1.0, -0.5, 2.0, -0.5])
    found = values(report)
    assert found["accuracy"] == found["lenient_accuracy"] == pytest.approx(2 / 3)
    assert (found["format_rate"], found["failed_rate"], found["reward"]) == (0.5, 0.5, 0.5)
    text = (report.directory / "report.md").read_text()
    assert "A fault of the environment ended 2 of 4 conversations, which count as wrong." in text
    assert "| failed_rate" in text
    sound = evaluated(rows, [RIGHT] * 4, faults=[None] * 4)
    assert (values(sound)["failed_rate"], values(sound)["accuracy"]) == (0.0, 1.0)
    assert "failed_rate" not in values(evaluated(rows, [RIGHT] * 4))


def test_faults_instead_of_bad_answers_make_no_better_model(evaluated):
    """Where the base answers badly (-1) the new model ends its environment: both have the same score there."""
    rows = [Row(f"{number:02}", ()) for number in range(12)]
    base = evaluated(rows, ["text"] * 12, label="base", faults=[None] * 12, reward=[-1.0] * 10 + [1.0] * 2)
    ours = evaluated(rows, ["text"] * 12, faults=["step hung"] * 10 + [None] * 2, reward=[0.0] * 10 + [1.0] * 2)
    test = compare(ours, base, metric="reward", alpha=0.05)
    assert (test.prompts, test.difference, test.better) == (12, 0.0, False)


def test_an_environment_that_begins_nothing_is_not_measured(evaluated):
    with pytest.raises(DataError, match="began none of 2 conversations: reset raised OSError"):
        evaluated([Row("a"), Row("b")], ["", ""], faults=["reset raised OSError"] * 2, tokens=0)
    # A policy may end all that it plays.
    assert values(evaluated([Row("a"), Row("b")], ["x", "y"], faults=["step hung"] * 2))["accuracy"] == 0.0


def test_several_tasks_have_figures_of_their_own(evaluated):
    rows = [Row("a", task="sum"), Row("b", ("41",), "sum"), Row("c", (), "tone/1")]
    found = values(evaluated(rows, [RIGHT] * 3, reward=[1.0, 0.0, 3.0]))
    assert (found["accuracy/task/sum"], found["reward/task/sum"], found["reward/task/tone_1"]) == (0.5, 0.5, 3.0)
    assert "accuracy/task/tone_1" not in found
    assert not any("/task/" in name for name in values(evaluated(rows[:2], [RIGHT] * 2)))


def test_the_reward_of_the_same_prompts_is_tested_in_pairs(evaluated):
    rows = [Row(f"{number:02}", ()) for number in range(12)]
    base = evaluated(rows, ["text"] * 12, label="base", reward=[0.1 * number for number in range(12)])
    ours = evaluated(rows, ["text"] * 12, reward=[None, *(0.1 * number + 0.37 for number in range(1, 12))])
    test = compare(ours, base, metric="reward", alpha=0.05)
    assert (test.metric, test.prompts, test.better) == ("reward", 11, True)
    assert test.difference == pytest.approx(0.37)
    assert not compare(base, ours, metric="reward", alpha=0.05).better
    with pytest.raises(DataError, match="no held-out prompt has a value of accuracy"):
        compare(ours, base, metric="accuracy", alpha=0.05)


def test_accuracy_decides_where_there_is_one_and_else_the_reward(evaluated):
    known = evaluated([Row("a")], [RIGHT], reward=[1.0])
    unknown = evaluated([Row("a", ())], [RIGHT], label="base", reward=[1.0])
    assert deciding_metric(PromotionConfig(), known) == "accuracy"
    assert deciding_metric(PromotionConfig(), unknown) == "reward"
    assert deciding_metric(PromotionConfig(metric="reward"), known) == "reward"


@pytest.mark.parametrize("metric", ["accuracy", "pass_at_k", "rewards/other/mean", None])
def test_a_metric_that_was_not_measured_cannot_decide(evaluated, metric):
    rewards = {"reward": [1.0]} if metric else {}
    report = evaluated([Row("a", ())], ["text"], label="base", **rewards)
    with pytest.raises(ConfigError, match="ground truth") as refused:
        deciding_metric(PromotionConfig(metric=metric), report)
    assert "promotion.metric: reward" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"promotion": {"metric": "acuracy"}}, "one of accuracy"),
        ({"promotion": {"metric": "rewards/brief/mean"}}, "evaluation.rewards: [brief]"),
        ({"promotion": {"metric": "reward"}, "evaluation": {"rewards": []}}, "leave evaluation.rewards empty"),
        ({"promotion": {"metric": "accuracy"}, "completion": {"format": "none"}}, "promotion.metric: reward"),
        ({"promotion": {"metric": "accuracy"}, "completion": {"format": "json"}}, "completion.answer_key"),
        ({"evaluation": {"rewards": ["brief"]}}, "rewards.functions"),
        ({"evaluation": {"evaluators": {"brief": "brief"}}}, "package.module:function"),
        ({"evaluation": {"evaluators": {"length": "my:length"}}}, "another name"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_with_the_fix(given, fix):
    tree = {"data": {"train": [{"path": "a.jsonl"}]}, "stages": [{"name": "one", "rewards": ["length"]}]}
    RunConfig(**tree, promotion={"metric": "rewards/length/mean"})
    with pytest.raises(ValidationError) as refused:
        RunConfig(**tree, **given)
    assert fix in str(refused.value)
