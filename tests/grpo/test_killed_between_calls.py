"""A stage killed just before a call that changes its folder, wherever that is, ends in the bytes of one never killed."""

from functools import partial

import pytest

from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.results import StageResult
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
    """Train, or go on with, the stage in this folder."""
    directory = StageDir(root)
    spec = StageSpec.load(directory.spec)
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
        Trainer(directory, suite).train().save(directory.result)


def test_a_stage_killed_before_any_call_that_writes_ends_in_the_same_bytes(stages):
    whole = stages.write("whole", **SETTINGS)
    calls = count_calls(partial(train, whole.root), FILES, str(whole.root))
    wanted = left(whole)
    assert calls > 40
    for number in some(calls, POINTS, seed=5):
        directory = stages.write(f"killed-at-{number}", **SETTINGS)
        work = partial(train, directory.root)
        assert is_killed_at(number, work, FILES, str(directory.root)), f"call {number} of {calls}"
        # and once more, before it has got to where it was
        is_killed_at(max(1, number // 2), work, FILES, str(directory.root))
        assert not is_killed_at(0, work, FILES)
        assert left(directory) == wanted, f"killed before call {number} of {calls}"


def left(directory):
    """What has to be the same: weights, figures of each update, completions, kept checkpoints, and no halves."""
    result = StageResult.load(directory.result)
    figures = [
        {name: value for name, value in line.items() if not name.endswith("time") and name != "tokens_per_s"}
        for line in journal(directory)
    ]
    assert not list(directory.root.rglob("*.part")) + list(directory.root.rglob(".part*"))
    return {
        "sha256": result.sha256,
        "figures": figures,
        "completions": sorted(path.name for path in directory.root.glob("completions/*.parquet")),
        "checkpoints": sorted(path.name for path in directory.checkpoints.iterdir()),
    }
