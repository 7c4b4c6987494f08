"""A stage killed just before any call that changes its directory ends with the bytes of a stage that was never killed."""

from functools import partial

import pytest

from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.results.model import StageResult
from tests.grpo.conftest import journal
from tests.kill_at import FILES, count_calls, is_killed_at, some

pytestmark = [pytest.mark.long, pytest.mark.ci, pytest.mark.timeout(1800)]

SETTINGS = {
    "max_steps": 6,
    "save_steps": 2,
    "save_total_limit": 2,
    "num_iterations": 2,
    "steps_per_generation": 2,
    "rewards": {"functions": {"format": {"adaptive": {}}}},
}
POINTS = 8


def train(root):
    """Train or resume the stage in this directory."""
    directory = StageDir(root)
    spec = StageSpec.load(directory.spec)
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
        Trainer(directory, suite).train().save(directory.result)


def test_a_stage_killed_before_any_call_that_writes_ends_in_the_same_bytes(stages):
    uninterrupted = stages.write("uninterrupted", **SETTINGS)
    calls = count_calls(partial(train, uninterrupted.root), FILES, str(uninterrupted.root))
    wanted = left(uninterrupted)
    assert calls > 40
    for number in some(calls, POINTS, seed=5):
        directory = stages.write(f"killed-at-{number}", **SETTINGS)
        work = partial(train, directory.root)
        assert is_killed_at(number, work, FILES, str(directory.root)), f"call {number} of {calls}"
        # And once more, before it has reached that point again.
        is_killed_at(max(1, number // 2), work, FILES, str(directory.root))
        assert not is_killed_at(0, work, FILES)
        assert left(directory) == wanted, f"killed before call {number} of {calls}"


def left(directory):
    """What has to be equal: weights, figures of each update, completions, checkpoints; and nothing unfinished is left."""
    result = StageResult.load(directory.result)
    figures = [
        {name: value for name, value in line.items() if not name.endswith("time") and name != "tokens_per_s"}
        for line in journal(directory)
    ]
    assert not list(directory.root.rglob("*.part"))
    return {
        "sha256": result.sha256,
        "figures": figures,
        "completions": sorted(path.name for path in directory.root.glob("completions/*.parquet")),
        "checkpoints": sorted(path.name for path in directory.checkpoints.iterdir()),
    }
