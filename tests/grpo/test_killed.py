"""kill -9 on a stage before calls of a table, then the same command: it ends as a stage that nobody killed."""

import os
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from grpo_tasks.grpo import __main__ as command
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.completion import CompletionConfig
from schemas.config.rollout import InteractionConfig
from schemas.results.model import ModelRef, StageResult
from tests.grpo.conftest import journal
from tests.in_process import InProcessWorker, suite_of
from tests.kill_at import FILES, count_calls, is_killed_at, some
from tests.rollout.tool_model import TOOLS, write_model
from tests.supervised.conftest import sums  # noqa: F401 - a fixture

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

OWN = '''
def answered(completions, turns, **columns):
    """Calls that were answered, less those that failed."""
    return [float(sum(turn["calls"] - 2 * turn["errors"] for turn in each)) for each in turns]

class Counter:
    """Counts the digits of two turns."""

    def reset(self, row, seed):
        self.turns = 0
        return [{"role": "user", "content": f"Digits, please. {row['answer']}"}]

    def step(self, completion):
        self.turns += 1
        given = sum(character.isdigit() for character in completion) / max(1, len(completion))
        said = [{"role": "user", "content": f"{self.turns} <|im_end|>"}]
        return {"messages": said, "done": self.turns == 2, "reward": given}
'''
SAVED = {"save_steps": 2, "save_total_limit": 2}
ADAPTIVE = {"rewards": {"functions": {"format": {"adaptive": {}}}}}
SUBJECTS = {
    "one update a rollout": {"kind": "grpo", "max_steps": 5, **SAVED},
    "updates with a reference": {
        "kind": "grpo", "max_steps": 6, "num_iterations": 2, "steps_per_generation": 2, "beta": 0.05, **SAVED, **ADAPTIVE,
    },
    "an environment": {
        "kind": "grpo", "max_steps": 4, "length": 16, "stage_rewards": ["environment"], **SAVED,
        "sections": {"interaction": InteractionConfig(environment="own:Counter", workers=1)},
    },
    "tools": {
        "kind": "grpo", "max_steps": 6, "length": 16, "stage_rewards": ["answered"], "own_model": True, **SAVED,
        "sections": {
            "interaction": InteractionConfig(tools=["own:add"], workers=1, max_turns=3, max_tokens=200),
            # The model calls within its reasoning, where no call would count.
            "completion": CompletionConfig(format="none"),
        },
    },
    "demonstrations": {"kind": "sft", "max_steps": 12, "length": 64, **SAVED},
    "rejection": {"kind": "rejection", "max_steps": 4, "stage_rewards": ["format", "correctness"], "save_steps": 1},
}  # fmt: skip
POINTS = {"updates with a reference": 5}
"""Calls to be killed before; of the other subjects two."""


@pytest.fixture
def write(sums, tmp_path):  # noqa: F811 - the fixture
    """Write a stage of a subject; its own code lies in the working directory."""
    (tmp_path / "own.py").write_text(TOOLS + OWN, encoding="utf-8")
    made = []

    def make(name, subject):
        settings = dict(SUBJECTS[subject])
        sections = settings.pop("sections", {})
        if settings.pop("own_model", False):
            made[:] = made or [str(write_model(tmp_path / "model", weights=True))]
            rewards = {"functions": {"answered": {"function": "own:answered"}}, "module_dir": str(tmp_path)}
            settings |= {"start": ModelRef(path=made[0]), "model": {"path": made[0]}, "rewards": rewards}
        directory = sums.write(name, **settings)
        StageSpec.load(directory.spec).model_copy(update=sections).save(directory.spec)
        return directory

    return make


def train(root: Path) -> None:
    """Train or resume a stage as its command does, but for a process of rewards that are built in."""
    os.chdir(root.parent)
    suite = suite_of(StageSpec.load(root / "spec.json"))
    if isinstance(suite.worker, InProcessWorker):
        command.RewardSuite = lambda *_, **__: suite
    command.main(root)


@pytest.mark.parametrize("subject", [pytest.param(each, marks=[pytest.mark.ci] if each in POINTS else []) for each in SUBJECTS])
def test_a_stage_killed_before_any_write_ends_the_same(write, subject):
    whole = write("whole", subject)
    calls = count_calls(partial(train, whole.root), FILES, str(whole.root))
    wanted = left(whole)
    assert calls > 15
    for number in some(calls, POINTS.get(subject, 2), seed=5):
        killed = write(f"killed-at-{number}", subject)
        work = partial(train, killed.root)
        assert is_killed_at(number, work, FILES, str(killed.root)), f"call {number} of {calls}"
        # And once more, before it has reached that point again.
        is_killed_at(max(1, number // 2), work, FILES, str(killed.root))
        assert not is_killed_at(0, work, FILES)
        assert left(killed) == wanted, f"killed before call {number} of {calls}"


def left(directory):
    """What has to be equal: weights, figures of each update, completions, checkpoints; and nothing unfinished is left."""
    assert not list(directory.root.rglob("*.part"))
    figures = [
        {name: value for name, value in line.items() if not name.endswith("time") and name != "tokens_per_s"}
        for line in journal(directory)
    ]
    assert len({line["loss"] for line in figures}) > 1
    return {
        "sha256": StageResult.load(directory.result).sha256,
        "figures": figures,
        "completions": {path.name: pl.read_parquet(path).to_dicts() for path in directory.root.glob("completions/*.parquet")},
        "checkpoints": sorted(path.name for path in directory.checkpoints.iterdir()),
    }
