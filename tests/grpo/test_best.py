"""Held-out evaluations while a stage trains: the result is the best policy, not the last one."""

import pytest

from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.stage.stage_dir import StageSpec
from tests.grpo.conftest import journal
from tests.in_process import suite_of

# The learning rate lets the policy fall apart after its first good updates.
FALLING = {"max_steps": 12, "eval_steps": 2, "num_eval_prompts": 16, "learning_rate": 0.02, "save_steps": 4}


def evaluations(directory):
    lines = journal(directory)
    return {step: line["eval_reward"] for step, line in enumerate(lines, start=1) if "eval_reward" in line}


@pytest.mark.slow
def test_the_best_policy_is_the_stages_result(stages):
    result, directory = stages.train("best", **FALLING)
    found = evaluations(directory)
    assert list(found) == [2, 4, 6, 8, 10, 12]
    best = max(found, key=found.get)
    assert found[12] < found[best]
    assert result.best_step == best
    last, other = stages.train("last", **FALLING | {"load_best_model_at_end": False})
    assert last.best_step is None
    assert file_sha256(directory.final / "adapter_model.safetensors") == result.sha256 != last.sha256
    assert evaluations(other) == found


@pytest.mark.slow
def test_a_stage_killed_after_its_best_evaluation_ends_with_the_same_weights(stages):
    uninterrupted, wanted = stages.train("uninterrupted", **FALLING)
    directory = stages.write("killed", **FALLING)
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        trainer = stages.trainer(directory, suite)
        trainer.updates = 8
        trainer.train()
    directory.result.unlink()
    with suite_of(spec) as suite:
        result = stages.trainer(directory, suite).train()
    assert (result.sha256, result.best_step) == (uninterrupted.sha256, uninterrupted.best_step)
    assert evaluations(directory) == evaluations(wanted)


@pytest.mark.slow
def test_a_plateau_ends_the_stage(stages):
    result, directory = stages.train("flat", **FALLING | {"max_steps": 40, "early_stopping_patience": 3})
    found = evaluations(directory)
    assert result.stopped == "plateau"
    assert result.steps < 40
    assert list(found).index(result.best_step) == len(found) - 4


@pytest.mark.slow
def test_evaluations_do_not_change_the_training(stages):
    settings = {"max_steps": 4, "save_steps": 2}
    plain, _ = stages.train("plain", **settings)
    evaluated, directory = stages.train("evaluated", **settings, eval_steps=1, load_best_model_at_end=False)
    assert evaluated.sha256 == plain.sha256
    assert len(evaluations(directory)) == 4


def test_the_held_out_figures_are_those_of_the_rewards(stages):
    _, directory = stages.train("figures", max_steps=1, eval_steps=1)
    [line] = journal(directory)
    weights = {"incremental_format": 1.0, "format": 1.0}
    total = sum(weight * line[f"eval_rewards/{name}/mean"] for name, weight in weights.items())
    assert line["eval_reward"] == pytest.approx(total)
    assert 0 <= line["eval_rewards/format/success"] <= 1
