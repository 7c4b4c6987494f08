"""The arithmetic of an estimate: against tokens counted one by one, and the lengths of completions against scipy."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import CensoredData, ecdf

from grpo_tasks.planning.time_plan import FINISHED, LONG_S, Costs, Lengths, Rows, estimate, savings
from schemas.config.load import load_config, with_setting
from schemas.config.stage import DemonstrationsConfig, StageConfig
from schemas.results.model import PROOF_TOKENS
from schemas.results.speed import Speed

ROWS = Rows(train=37, eval=19, prompt_tokens=10.0, guards=[("few", 5), ("many", 30)])
NOTHING = dict.fromkeys(("load_s", "prompt_s", "decode_s", "row_s", "update_s", "train_s", "score_s", "generate_s"), 0.0)


def costing(lengths=(6,), ended=(True,), **rates):
    return Speed(**NOTHING | rates, lengths=list(lengths), ended=list(ended))


def config_of(*settings):
    return load_config("demo", ["rollout.max_completion_length=12", *settings])


def counted(config, stage, length):
    """Tokens of a stage, counted update by update and completion by completion; every completion has one length."""
    found = dict.fromkeys(("prompts", "steps", "rows", "updates", "trained", "scored"), 0)
    for update in range(stage.num_updates(ROWS.train)):
        groups = range(stage.completions_per_update // stage.num_generations)
        if update % stage.updates_per_rollout == 0:
            requests = [group for group in range(stage.prompts_per_rollout) for _ in range(stage.num_generations)]
            found["prompts"] += 10 * (len(set(requests)) if config.resources.share_prompts else len(requests))
            for start in range(0, len(requests), config.rollout.max_batch_size):
                for _ in range(length):
                    found["steps"] += 1
                    found["rows"] += len(requests[start : start + config.rollout.max_batch_size])
        tokens = 0
        for _ in groups:
            tokens += 10 if config.resources.share_prompts else 10 * stage.num_generations
            for _ in range(stage.num_generations):
                tokens += length
        found["updates"] += 1
        found["trained"] += tokens
        passes = (stage.beta > 0) + (stage.updates_per_rollout > 1) + (stage.top_entropy_quantile < 1)
        found["scored"] += passes * tokens
        if stage.eval_steps and ((update + 1) % stage.eval_steps == 0 or update + 1 == stage.num_updates(ROWS.train)):
            for place in range(length):
                found["steps"] += 1
                for _ in range(min(stage.num_eval_prompts, ROWS.eval)):
                    found["rows"] += 1
                    found["prompts"] += 10 if place == 0 else 0
        if stage.beta == 0 and stage.kl_every_steps and update % stage.kl_every_steps == 0:
            found["scored"] += tokens
    return found


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["stages.0.steps_per_generation=2", "stages.0.num_iterations=3"],
        ["stages.0.beta=0", "stages.0.kl_every_steps=10", "stages.0.top_entropy_quantile=0.5"],
        ["stages.0.max_steps=null", "stages.0.num_train_epochs=3", "rollout.max_batch_size=24"],
        ["resources.share_prompts=false", "stages.0.num_generations=16"],
        ["stages.0.eval_steps=30", "stages.0.num_eval_prompts=16"],
    ],
)
def test_the_time_of_a_stage_is_that_of_its_tokens(settings):
    config = config_of(*settings)
    stage = config.stages[0]
    of = counted(config, stage, 6)
    rates = {"prompt_s": "prompts", "decode_s": "steps", "row_s": "rows", "update_s": "updates", "train_s": "trained"}
    for rate, what in (rates | {"score_s": "scored"}).items():
        assert Costs(config, costing(**{rate: 1.0}), ROWS).stage(stage) == pytest.approx(of[what]), what


def test_other_kinds_of_stages_train_on_what_they_choose():
    costs = Costs(config_of(), costing(demonstration_tokens=4.0), ROWS)
    taught = StageConfig(name="a", kind="sft", demonstrations=DemonstrationsConfig(column="solution"))
    assert costs.trained_tokens(taught) == 8 * (10 + 4)
    best = {"kind": "rejection", "rewards": ["format"], "num_generations": 4, "per_device_train_batch_size": 8}
    assert costs.trained_tokens(StageConfig(name="b", **best)) == 2 * (10 + 6)
    assert costs.trained_tokens(StageConfig(name="b", keep_completions=2, **best)) == 2 * (10 + 2 * 6)


def test_dead_groups_cost_an_update_nothing():
    config, tokens = config_of("stages.0.beta=0", "stages.0.kl_every_steps=0"), 8 * (10 + 8 * 6)
    half = costing(train_s=1.0, live=0.5)
    assert Costs(config, half, ROWS).update(config.stages[0]) == pytest.approx(tokens / 2)
    kept = config_of("stages.0.beta=0", "stages.0.kl_every_steps=0", "stages.0.skip_dead_groups=false")
    assert Costs(kept, half, ROWS).update(kept.stages[0]) == pytest.approx(tokens)


def test_an_evaluation_and_the_lab_are_their_prompts_and_samples():
    config = config_of("evaluation.max_prompts=8", "evaluation.num_samples=3", "lab.num_prompts=4")
    steps = {step.label: step.seconds for step in estimate(config, costing(row_s=1.0), ROWS).steps}
    assert steps["evaluate_model-base"] == pytest.approx(8 * 3 * 6 + 8 * 6)  # the greedy ones too
    assert steps["evaluate_model-guard-few-base"] == pytest.approx(5 * 3 * 6 + 5 * 6)
    assert steps["evaluate_model-guard-many-merged"] == pytest.approx(8 * 3 * 6 + 8 * 6)
    assert steps["probe_rewards"] == pytest.approx(4 * 8 * 6)
    once = estimate(config, costing(load_s=1.0), ROWS)
    assert all(step.seconds >= 1.0 for step in once.steps)


def test_a_proof_generates_no_more_than_its_limit():
    config = config_of("rollout.max_completion_length=1000")
    costs = Costs(config, costing([1000], [False], generate_s=1.0), ROWS)
    assert costs.merge() == pytest.approx(4 * PROOF_TOKENS)


samples = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=12)


@given(samples)
def test_lengths_of_stopped_completions_are_those_of_scipy(sample):
    tokens, ended = zip(*sample, strict=True)
    data = CensoredData.right_censored(np.array(tokens, dtype=float), ~np.array(ended))
    theirs = ecdf(data).sf.evaluate(np.arange(max(tokens)))
    assert Lengths(tokens, ended).alive(max(tokens)) == pytest.approx(theirs, abs=1e-12)


def test_completions_that_were_all_stopped_have_the_full_length():
    assert Lengths([4, 4], [False, False]).alive(10) == pytest.approx(np.ones(10))
    # Two of the eight tokens that were seen ended a completion.
    assert Lengths([2, 2, 4], [True, True, False]).alive(6)[4:] == pytest.approx([1 / 3, 1 / 3 * 0.75])


def test_steps_last_until_the_longest_completion_ends():
    lengths = (2, 3, 7)
    costs = Costs(config_of(), costing(lengths, (True,) * 3), ROWS)
    for rows in (1, 2, 3):
        longest = [max(chosen) for chosen in itertools.product(lengths, repeat=rows)]
        assert costs.steps(rows) == pytest.approx(np.mean(longest))


def test_what_is_done_is_not_estimated_again():
    config, speed = config_of("stages.0.max_steps=10"), costing(update_s=1.0)
    left = estimate(config, speed, ROWS, done={"probe_rewards": FINISHED, "train_stage-format": 4})
    steps = {step.label: step.seconds for step in left.steps}
    assert "probe_rewards" not in steps
    assert steps["train_stage-format"] == pytest.approx(6)


def test_every_saving_is_what_the_setting_saves():
    config, speed = config_of("evaluation.max_prompts=16"), costing((6, 9), (True, False), row_s=1.0, train_s=0.5, load_s=1.0)
    whole = estimate(config, speed, ROWS)
    assert whole.seconds > LONG_S
    assert len(whole.savings) == 3
    found = savings(config, speed, ROWS)
    assert list(whole.savings) == found[:3]
    for one in found:
        shorter = estimate(with_setting(config, one.setting), speed, ROWS)
        assert whole.seconds - shorter.seconds == pytest.approx(one.seconds)
        assert one.seconds > 0


def test_what_is_not_counted_is_named():
    assert not estimate(config_of(), costing(reward_s=0.0), ROWS).not_counted
    by_trl = config_of("stages.1.engine=trl")
    named = estimate(by_trl, costing(device="cuda"), ROWS).sections()[-1].text
    assert all(
        words in named for words in ("correctness, format, incremental_format", "TRL takes (stage correctness)", "the merge")
    )


def test_a_run_of_less_than_an_hour_names_no_savings():
    assert not estimate(config_of(), costing(load_s=1.0), ROWS).savings


def test_a_time_limit_shortens_lab_and_evaluations_but_not_those_of_guards():
    def seconds(*settings):
        config = config_of("lab.num_prompts=64", "evaluation.max_prompts=null", *settings)
        found = estimate(config, costing(decode_s=20.0), ROWS)
        return {step.label: step.seconds for step in found.steps}

    free, limited = seconds(), seconds("lab.max_minutes=1", "evaluation.max_minutes=2")
    assert free["probe_rewards"] > 60 < 120 < free["evaluate_model-base"]
    assert (limited["probe_rewards"], limited["evaluate_model-base"], limited["evaluate_model-merged"]) == (60, 120, 120)
    same = free.keys() - {label for label in free if label.startswith(("probe", "evaluate_model")) and "guard" not in label}
    assert "evaluate_model-guard-few-base" in same
    assert all(free[label] == limited[label] for label in same)
