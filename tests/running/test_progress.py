"""What people see of a stage."""

from grpo_tasks.running.progress import StageProgress
from grpo_tasks.stage.journal import Journal
from schemas.config import StageConfig


def test_a_metric_that_is_measured_now_and_then_has_its_latest_value_in_the_summary(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl", writes=False)
    for step in range(1, 33):
        journal.append(step, {"reward": 1.0} | ({"kl": step / 100} if step % 10 == 1 else {}))
    # Outside of a Prefect run there is no logger, and the summary needs none.
    progress = object.__new__(StageProgress)
    progress._stage = StageConfig(name="s", rewards=["format"])
    lines = progress.summary(journal).splitlines()
    assert lines[2] == "| update | reward | kl |"
    shown = [line.split(" | ") for line in lines[4:13]]
    assert [(row[0], row[2]) for row in shown][:4] == [
        ("| 1", "0.010 |"),
        ("| 4", "0.010 |"),
        ("| 8", "0.010 |"),
        ("| 12", "0.110 |"),
    ]
