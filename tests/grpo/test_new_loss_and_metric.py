"""A new loss is its name in the config and a row in losses.py; a new metric is its line in the table and its measurement."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = "Loss(lambda ratio, inputs, _: -inputs.advantages * inputs.logps, lambda _: (-math.inf, math.inf), mean_weights)"
MEDIAN = 'MEDIAN_LENGTH = _update("completions/median_length", "median length", "tokens")'
EDITS = {
    "schemas/config/stage.py": ('loss_type: Literal["grpo", ', 'loss_type: Literal["grpo", "reinforce", '),
    "grpo_tasks/grpo/losses.py": ("LOSSES = {\n", f'LOSSES = {{\n    "reinforce": {ROW},\n'),
    "schemas/metrics.py": ("MIN_LENGTH = ", f"{MEDIAN}\nMIN_LENGTH = "),
    "grpo_tasks/grpo/measure.py": ("metric.MIN_LENGTH: ", "metric.MEDIAN_LENGTH: float(np.median(lengths)), metric.MIN_LENGTH: "),
}
"""A file of the product, a place in it, and what stands there then."""


@pytest.mark.slow
def test_a_new_loss_trains_and_a_new_metric_is_in_the_journal(stages, tmp_path):
    copy = tmp_path / "copy"
    for package in ("flows", "grpo_tasks", "schemas"):
        # With what is compiled: a file that is edited below is compiled again.
        shutil.copytree(ROOT / package, copy / package)
    for file, (before, after) in EDITS.items():
        text = (copy / file).read_text(encoding="utf-8")
        assert text.count(before) == 1, file
        (copy / file).write_text(text.replace(before, after), encoding="utf-8")
    directory = stages.write(max_steps=2)
    spec = json.loads(directory.spec.read_text())
    spec["stage"]["loss_type"] = "reinforce"
    directory.spec.write_text(json.dumps(spec))
    subprocess.run(
        [sys.executable, "-P", "-m", "grpo_tasks.grpo", str(directory.root)],
        check=True, capture_output=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(copy)},
    )  # fmt: skip
    updates = [json.loads(line)["metrics"] for line in directory.journal.read_text().splitlines()]
    assert len(updates) == 2
    assert all(
        one["completions/min_length"] <= one["completions/median_length"] <= one["completions/max_length"] for one in updates
    )
    # Its advantages are centred, but its log-probabilities are not: the loss is not the 0 of a ratio of 1.
    assert all(abs(one["loss"]) > 1e-4 and one["grad_norm"] > 0 for one in updates)
