"""`run_stage`, the seam between the trainer and its callers, and what a checkpoint holds besides weights and optimizer."""

import pytest

from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import ConfigError, RewardError
from tests.grpo.conftest import events, journal
from tests.in_process import suite_of


def spec_of(stages, **settings):
    return StageSpec.load(stages.write("written", max_steps=2, **settings).spec)


@pytest.mark.slow
def test_a_child_process_and_this_process_train_the_same_weights(stages, tmp_path):
    spec, ticks = spec_of(stages), []
    here = run_stage(spec, tmp_path / "here", in_process=True)
    child = run_stage(spec, tmp_path / "a folder" / "child", tick=lambda: ticks.append(1))
    assert (here.sha256, here.steps) == (child.sha256, 2)
    assert ticks
    assert child.directory == tmp_path / "a folder" / "child"


@pytest.mark.slow
def test_a_finished_stage_is_only_read(stages, tmp_path):
    spec = spec_of(stages)
    first = run_stage(spec, tmp_path / "done", in_process=True)
    assert run_stage(spec, tmp_path / "done", in_process=True) == first
    assert run_stage(spec, tmp_path / "done") == first


def test_a_directory_of_another_stage_is_refused_and_left_alone(stages, tmp_path):
    spec = spec_of(stages)
    spec.save(tmp_path / "spec.json")
    before = (tmp_path / "spec.json").read_bytes()
    with pytest.raises(ConfigError, match="another stage"):
        run_stage(spec.model_copy(update={"key": "other"}), tmp_path, in_process=True)
    assert (tmp_path / "spec.json").read_bytes() == before


def test_an_error_of_a_reward_reaches_the_caller_in_this_process(stages, tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text("def fail(completions, **columns):\n    raise ValueError('no score')\n")
    monkeypatch.chdir(tmp_path)
    spec = spec_of(stages, rewards={"functions": {"fail": {"function": "failing:fail"}}}, stage_rewards=["fail"])
    with pytest.raises(RewardError, match="no score"):
        run_stage(spec, tmp_path / "failed", in_process=True)


@pytest.mark.slow
def test_a_resumed_stage_knows_its_counters_its_guards_and_its_adaptive_weights(stages):
    adaptive = {"functions": {"format": {"adaptive": {}}}}
    _, directory = stages.train("stopped", max_steps=2, save_steps=1, rewards=adaptive)
    directory.result.unlink()
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        trainer = stages.trainer(directory, suite)
        counters = trainer.counters
        assert (counters.step, counters.resumed, counters.tokens) == (2, 1, journal(directory)[-1]["num_tokens"])
        assert counters.seconds > 0
        state = suite.state()
        # A roll back goes to the oldest checkpoint where none is old enough; it is saved with the next one.
        assert trainer.checkpoints.roll_back(to=-8) == 1
        assert (trainer.guards.since, trainer.guards.rollbacks, counters.step) == (2, 1, 2)
        trainer.checkpoints.save()
    with suite_of(spec) as suite:
        again = stages.trainer(directory, suite)
        assert (again.guards.since, again.guards.rollbacks, again.counters.resumed) == (2, 1, 2)
        assert suite.state() == state
    assert [event["event"] for event in events(directory) if event["event"] == "resumed"] == ["resumed"] * 2
