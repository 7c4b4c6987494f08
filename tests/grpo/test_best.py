"""Held-out evaluations while a stage trains: the result is the best policy, not the last one."""

import pytest

from grpo_tasks.content.hashes import file_sha256
from tests.grpo.conftest import journal

# The learning rate lets the policy fall apart after its first good updates.
FALLING = {"max_steps": 12, "eval_steps": 2, "num_eval_prompts": 16, "learning_rate": 0.02, "save_steps": 4}


def evaluations(directory):
    return {step: line["eval_reward"] for step, line in enumerate(journal(directory), start=1) if "eval_reward" in line}


@pytest.mark.slow
def test_the_best_policy_is_the_stages_result(trained):
    result, directory = trained(**FALLING)
    found = evaluations(directory)
    assert list(found) == [2, 4, 6, 8, 10, 12]
    best = max(found, key=found.get)
    assert found[12] < found[best]
    assert result.best_step == best
    last, other = trained(**FALLING | {"load_best_model_at_end": False})
    assert last.best_step is None
    assert file_sha256(directory.final / "adapter_model.safetensors") == result.sha256 != last.sha256
    assert evaluations(other) == found


@pytest.mark.slow
def test_a_stage_killed_after_its_best_evaluation_ends_with_the_same_weights(stages, trained):
    uninterrupted, wanted = trained(**FALLING)
    directory = stages.write("killed", **FALLING)
    stages.resume(directory, until=8)
    result = stages.resume(directory)
    assert (result.sha256, result.best_step) == (uninterrupted.sha256, uninterrupted.best_step)
    assert evaluations(directory) == evaluations(wanted)


@pytest.mark.slow
def test_evaluations_do_not_change_the_training(trained):
    settings = {"max_steps": 4, "save_steps": 2}
    evaluated, directory = trained(**settings, eval_steps=1, load_best_model_at_end=False)
    assert evaluated.sha256 == trained(**settings)[0].sha256
    lines = journal(directory)
    for line in lines:
        # Both functions have the weight 1.
        total = sum(line[f"eval_rewards/{name}/mean"] for name in ("incremental_format", "format"))
        assert line["eval_reward"] == pytest.approx(total)
        assert 0 <= line["eval_rewards/format/success"] <= 1
    assert len(lines) == 4
