"""A stage as the pipeline starts it, with an environment in worker processes: `python -m grpo_tasks.grpo STAGE_DIR`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.learning.interaction import InteractionConfig
from schemas.results.model import StageResult
from tests.grpo.conftest import journal

pytest.importorskip("grpo_tasks.environments.pool")
pytestmark = pytest.mark.long

COUNTER = '''
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
SETTINGS = {"stage_rewards": ["environment"], "max_steps": 4, "save_steps": 1, "length": 16}


@pytest.fixture
def write(stages, tmp_path):
    """A stage whose policy plays with a counter; its module lies in the working directory of the process."""
    (tmp_path / "my_counter.py").write_text(COUNTER)

    def make(name):
        directory = stages.write(name, **SETTINGS)
        played = InteractionConfig(environment="my_counter:Counter", workers=1)
        StageSpec.load(directory.spec).model_copy(update={"interaction": played}).save(directory.spec)
        return directory

    return make


def train(directory, until=None):
    """Train or resume in a process of its own; with `until` it is killed as soon as the journal has that many lines."""
    command = [sys.executable, "-P", "-m", "grpo_tasks.grpo", str(directory.root)]
    process = subprocess.Popen(command, cwd=directory.root.parent, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    while process.poll() is None:
        lines = directory.journal.read_bytes().count(b"\n") if directory.journal.exists() else 0
        if until is not None and lines >= until:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.01)
    assert process.returncode == 0


def test_a_killed_stage_with_an_environment_ends_in_the_same_bytes(write):
    whole, killed = write("whole"), write("killed")
    train(whole)
    for lines in (2, 3):
        train(killed, until=lines)
    train(killed)
    results = [StageResult.load(one.result) for one in (whole, killed)]
    assert results[0].sha256 == results[1].sha256
    assert results[1].resumed >= 1
    assert [line["conversations/environment_reward"] for line in journal(whole)] == [
        line["conversations/environment_reward"] for line in journal(killed)
    ]
    assert {line["conversations/errors"] for line in journal(whole)} == {0.0}
    table = pl.read_parquet(whole.completions(1))
    assert all("Digits, please." in text and "1 <|im_end|>" in text for text in table["conversation"])
