"""What a sweep costs, before it runs."""

import json

from grpo_tasks.sweeping.forecast import forecast, update_seconds
from grpo_tasks.sweeping.grid import make_grid

OVER = ["stages.0.learning_rate=1e-5,5e-6", "stages.1.num_generations=4,8"]


def test_stages_that_runs_share_are_counted_once(tmp_path):
    cost = forecast(make_grid("demo", [], OVER, seeds=2).variants, tmp_path)
    # Two learning rates and two seeds for the first stage of 100 updates; each goes on with two group sizes for 150 updates.
    assert (cost.runs, cost.stages, cost.shared) == (8, 4 + 8, 4)
    assert cost.updates == 4 * 100 + 8 * 150
    assert cost.completions == 64 * cost.updates
    assert cost.seconds is None


def test_the_duration_is_that_of_earlier_runs_here(tmp_path):
    journal = tmp_path / "train_stage" / "format-1" / "metrics.jsonl"
    journal.parent.mkdir(parents=True)
    lines = [{"step": step, "metrics": {"step_time": seconds}} for step, seconds in enumerate((9.0, 0.5, 0.5), start=1)]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert update_seconds(tmp_path) == 0.5
    cost = forecast(make_grid("demo", [], OVER, seeds=1).variants, tmp_path)
    assert cost.seconds == 0.5 * (2 * 100 + 4 * 150)
    assert "about 7 min" in cost.lines()[-1]


def test_a_stage_in_epochs_says_that_its_length_depends_on_the_data(tmp_path):
    made = make_grid("demo", ["stages.1.max_steps=null", "stages.1.num_train_epochs=1"], OVER, seeds=1)
    assert "depends on the data" in forecast(made.variants, tmp_path).lines()[0]
