"""A stage with tools that is killed many times at random moments ends with the bytes of a stage that was never killed."""

import json
import os
import random
import signal
import time
from pathlib import Path

import polars as pl
import pytest

from grpo_tasks.grpo.__main__ import main
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.completion import CompletionConfig
from schemas.config.learning.interaction import InteractionConfig
from schemas.results.model import ModelRef, StageResult
from tests.grpo.conftest import journal
from tests.grpo.test_killed_between_calls import left
from tests.kill_at import LIMIT_S, PROCESSES
from tests.rollout.tool_model import TOOLS, write_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

REWARD = '''
def answered(completions, turns, **columns):
    """Calls that were answered, less those that failed."""
    return [float(sum(turn["calls"] - 2 * turn["errors"] for turn in each)) for each in turns]
'''
SETTINGS = {
    "stage_rewards": ["answered"],
    "save_steps": 2,
    "save_total_limit": 2,
    "length": 16,
}


@pytest.fixture
def write(stages, tmp_path):
    """A stage of a model that calls tools; they lie in its working directory."""
    (tmp_path / "my_tools.py").write_text(TOOLS + REWARD, encoding="utf-8")
    model = str(write_model(tmp_path / "model", weights=True))

    def make(name, max_steps):
        rewards = {"functions": {"answered": {"function": "my_tools:answered"}}, "module_dir": str(tmp_path)}
        directory = stages.write(
            name, start=ModelRef(path=model), model={"path": model}, rewards=rewards, max_steps=max_steps, **SETTINGS
        )
        sections = {
            "interaction": InteractionConfig(tools=["my_tools:add"], workers=1, max_turns=3, max_tokens=200),
            # The model calls within its reasoning, where no call would count.
            "completion": CompletionConfig(format="none"),
        }
        StageSpec.load(directory.spec).model_copy(update=sections).save(directory.spec)
        return directory

    return make


def train_there(root: Path) -> None:
    """Train or resume the stage as its command does, in its working directory."""
    os.chdir(root.parent)
    main(root)


def start(directory):
    process = PROCESSES.Process(target=train_there, args=(directory.root,))
    process.start()
    return process


def lines(directory):
    return directory.journal.read_bytes().count(b"\n") if directory.journal.exists() else 0


def train(directory):
    process = start(directory)
    process.join(LIMIT_S)
    assert process.exitcode == 0


def kill_once(directory, draw, update_s):
    """Start the stage, and kill it at a random moment of its next two updates, or before it has made one."""
    wanted, process = lines(directory) + draw.choice([0, 1, 1, 2]), start(directory)
    while lines(directory) < wanted and process.is_alive():
        time.sleep(0.005)
    time.sleep(draw.uniform(0.0, 2 * update_s))
    os.kill(process.pid, signal.SIGKILL)
    process.join(LIMIT_S)
    return process.exitcode


def test_a_stage_with_tools_that_is_killed_many_times_ends_in_the_same_bytes(write):
    # More updates than the processes can make before they are killed.
    kills, max_steps = 20, 60
    whole, killed = write("whole", max_steps), write("killed", max_steps)
    train(whole)
    updates = journal(whole)
    assert sum(line["tools/call_frequency"] > 0 for line in updates) > len(updates) / 2
    # The weights change, so bytes that are equal say something.
    assert sum(line["reward_std"] > 0 for line in updates) > len(updates) / 2
    draw = random.Random(11)
    update_s = StageResult.load(whole.result).seconds / len(updates)
    codes = [kill_once(killed, draw, update_s) for _ in range(kills)]
    assert codes == [-signal.SIGKILL] * kills
    before = lines(killed)
    train(killed)
    assert 0 < before < len(updates)
    assert StageResult.load(killed.result).resumed > 0
    assert left(killed) == left(whole)
    assert tables(killed) == tables(whole)


def tables(directory):
    """What was said in the conversations of each update, answers of the tools included."""
    found = {path.name: pl.read_parquet(path)["conversation"].to_list() for path in directory.root.glob("completions/*.parquet")}
    answers = [
        answer["content"]
        for texts in found.values()
        for text in texts
        for turn in json.loads(text)["turns"]
        for answer in turn["answers"]
    ]
    assert {"3", "50"} <= set(answers)
    return found
