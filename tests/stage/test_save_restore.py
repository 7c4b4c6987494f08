"""What a checkpoint holds besides weights and optimizer."""

import pytest

from grpo_tasks.stage.stage_dir import StageSpec
from tests.grpo.conftest import journal
from tests.grpo.test_guards import events
from tests.in_process import suite_of


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
