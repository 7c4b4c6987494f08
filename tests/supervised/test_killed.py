"""A stage of kind sft or rejection that is killed again and again ends in the same bytes as one that is not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_tasks.content.hashes import folder_sha256
from schemas.results.model import StageResult

KINDS = {
    "sft": {"max_steps": 12, "save_steps": 2, "length": 64},
    "rejection": {"kind": "rejection", "max_steps": 6, "save_steps": 1, "stage_rewards": ["format", "correctness"]},
}


def run(directory, *, until=None):
    """Train in a process of its own; with `until` it is killed as soon as the journal has that many lines."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "grpo_tasks.grpo", str(directory.root)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    while process.poll() is None:
        lines = directory.journal.read_bytes().count(b"\n") if directory.journal.exists() else 0
        if until is not None and lines >= until:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return False
        time.sleep(0.01)
    return process.returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_killed_after_every_few_updates_ends_in_the_same_bytes(sums, kind):
    settings = KINDS[kind]
    whole, killed = sums.write("whole", **settings), sums.write("killed", **settings)
    assert run(whole)
    kills = sum(not run(killed, until=lines) for lines in range(1, settings["max_steps"], 2))
    assert run(killed)
    result = StageResult.load(killed.result)
    assert kills >= 2
    assert result.resumed >= 1
    assert result.sha256 == StageResult.load(whole.result).sha256
    assert folder_sha256(killed.final) == folder_sha256(whole.final)
    losses = [[json.loads(line)["metrics"]["loss"] for line in one.journal.read_text().splitlines()] for one in (killed, whole)]
    assert losses[0] == losses[1]
