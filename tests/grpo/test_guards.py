"""Guards of stages that really train: what they stop, and what a roll back leaves."""

import json
import shutil

import pytest

from grpo_tasks.grpo.learner import Learner
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import TrainingError
from tests.grpo.conftest import journal
from tests.in_process import suite_of

# Dead groups are computed, so that the KL of a policy that fell apart is known.
WILD = {"skip_dead_groups": False, "max_steps": 40, "beta": 0.001, "learning_rate": 0.05, "save_steps": 5, "save_total_limit": 4}


def events(directory):
    if not directory.events.exists():
        return []
    return [json.loads(line) for line in directory.events.read_text().splitlines()]


@pytest.mark.slow
def test_a_guard_stops_the_stage_with_numbers_and_advice(stages):
    with pytest.raises(TrainingError, match=r"kl_blow_up: kl is .* above 0\.5 .*lower the learning rate"):
        stages.train("stopped", **WILD, guards={"kl_blow_up": "stop"})


@pytest.mark.slow
def test_a_roll_back_continues_from_good_weights_with_a_smaller_learning_rate(stages):
    guards = {"kl_blow_up": "rollback", "rollback_learning_rate": 0.02, "max_rollbacks": 1}
    result, directory = stages.train("back", **WILD | {"lr_scheduler_type": "constant"}, guards=guards)
    lines = journal(directory)
    assert len(lines) == result.steps == 40
    [back] = [event for event in events(directory) if event["event"] == "rolled_back"]
    before, after = lines[: back["step"]], lines[back["step"] :]
    assert {line["learning_rate"] for line in before} == {0.05}
    assert all(line["learning_rate"] == pytest.approx(0.001) for line in after)
    assert after[0]["kl"] < 0.5 < before[-1]["kl"]


@pytest.mark.slow
def test_a_stage_killed_before_its_roll_back_ends_with_the_same_weights(stages):
    # It blows up within the first dozen updates; more of them would show nothing new.
    settings = WILD | {"max_steps": 16, "lr_scheduler_type": "constant"}
    guards = {"kl_blow_up": "rollback", "rollback_learning_rate": 0.02}
    uninterrupted, directory = stages.train("back", **settings, guards=guards)
    # What a kill before the roll back leaves: the checkpoints up to then.
    back = next(event["step"] for event in events(directory) if event["event"] == "rolled_back")
    killed = stages.write("killed", **settings, guards=guards)
    spec = StageSpec.load(killed.spec)
    with suite_of(spec) as suite:
        trainer = stages.trainer(killed, suite)
        trainer.updates = back - 1
        trainer.train()
    killed.result.unlink()
    shutil.rmtree(killed.checkpoints / f"step-{back - 1:06d}")
    with suite_of(spec) as suite:
        again = stages.trainer(killed, suite).train()
    assert (again.resumed, again.sha256) == (1, uninterrupted.sha256)
    assert [event["event"] for event in events(killed)].count("rolled_back") == 1


@pytest.mark.slow
def test_a_stage_fails_after_max_rollbacks(stages):
    guards = {"kl_blow_up": "rollback", "rollback_learning_rate": 1.0, "max_rollbacks": 1}
    with pytest.raises(TrainingError, match="kl_blow_up, after 1 roll backs"):
        stages.train("wild", **WILD | {"max_steps": 80}, guards=guards)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_moves_no_weight(stages, monkeypatch):
    accumulate, calls = Learner._accumulate, []

    def poisoned(self, *arguments):
        accumulate(self, *arguments)
        calls.append(1)
        if len(calls) == 3:
            self._trained[0].grad.fill_(float("nan"))

    monkeypatch.setattr(Learner, "_accumulate", poisoned)
    settings = {"max_steps": 6, "save_steps": 1, "save_total_limit": 6}
    with pytest.raises(TrainingError, match="not finite"):
        stages.train("stopped", **settings)
    calls.clear()
    result, directory = stages.train("back", **settings, guards={"not_finite": "rollback"})
    assert result.steps == len(journal(directory)) == 6
    assert [event["event"] for event in events(directory)] == ["not_finite", "rolled_back"]
    assert "loss" not in journal(directory)[2]


@pytest.mark.slow
def test_a_stage_out_of_time_resumes_to_the_same_end(stages):
    settings = {"max_steps": 6, "num_iterations": 2, "save_steps": 100}
    uninterrupted, _ = stages.train("uninterrupted", **settings)
    directory = stages.write("late", **settings, resources={"max_hours": 1e-6})
    spec = StageSpec.load(directory.spec)
    for step in (2, 4):
        with (
            suite_of(spec) as suite,
            pytest.raises(TrainingError, match=f"stopped at update {step}"),
        ):
            stages.trainer(directory, suite).train()
        assert (directory.checkpoints / f"step-{step:06d}").exists()
    with suite_of(spec) as suite:
        assert stages.trainer(directory, suite).train().sha256 == uninterrupted.sha256
