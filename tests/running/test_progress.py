"""How often a stage's progress goes to the log and to MLflow."""

import logging

import pytest

from grpo_tasks.running import progress as progress_module
from grpo_tasks.running.progress import StageProgress
from grpo_tasks.stage.journal import Journal
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.stage import StageConfig
from schemas.errors import TrainingError


@pytest.fixture
def followed(tmp_path, monkeypatch, caplog):
    """Follow a stage whose journal the test writes; gives the updates that were logged and the shipments."""
    # Prefect's logger exists inside a run only.
    monkeypatch.setattr(progress_module, "run_logger", lambda: logging.getLogger("progress"))
    caplog.set_level(logging.INFO, "progress")
    directory = StageDir(tmp_path)
    journal = Journal(directory.journal)

    def follow(updates, *, flush_interval_s=1000.0, **settings):
        stage, shipped = StageConfig(name="only", rewards=["format"], **settings), []
        caplog.clear()
        with StageProgress(stage, directory, ship=lambda: shipped.append(1), ship_every_s=flush_interval_s) as progress:
            for step in updates:
                journal.append(step, {"reward": step / 10, "kl": 0.01})
                progress._poll(final=False)
        return [record.args[1] for record in caplog.records], len(shipped)

    return follow


def test_every_logging_steps_th_update_and_the_last_one_get_a_line(followed):
    assert followed(range(1, 8), logging_steps=3)[0] == [3, 6, 7]
    assert followed(range(8, 13), logging_steps=3)[0] == [9, 12], "a stage that resumes does not repeat its lines"
    assert followed([], logging_steps=1)[0] == []


def test_the_journal_is_shipped_every_flush_interval_and_at_the_end(followed):
    assert followed(range(1, 8))[1] == 1
    assert followed(range(8, 15), flush_interval_s=1e-9)[1] == 8


def test_prefect_shows_figures_and_time_left_regularly(followed, monkeypatch):
    shown = []
    monkeypatch.setattr(progress_module, "show_artifact", lambda *given: shown.append(given[:3]))
    followed(range(1, 8), max_steps=10)
    # The first update, and the end: ten seconds have not passed between.
    assert [(key, percent) for key, percent, _ in shown] == [("progress-only", 10.0), ("progress-only", 70.0)]
    assert shown[-1][2].startswith("only: update 7/10, reward 0.700, kl 0.010, ")
    assert shown[-1][2].endswith(" left")
    followed([], max_steps=7)
    assert shown[-1][1:] == (100.0, "only: update 7/7, reward 0.700, kl 0.010")


def test_the_time_left_is_judged_by_the_last_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "run_logger", lambda: logging.getLogger("progress"))
    stage = StageConfig(name="s", rewards=["format"], max_steps=5000)
    progress = StageProgress(stage, StageDir(tmp_path), ship=list, ship_every_s=1000.0)
    assert (progress.percent(), progress.now()) == (0.0, "s: update 0/5000")
    progress._remember([{"step": step, "timestamp_ms": 2000 * step, "metrics": {"reward": 1.0}} for step in range(1, 2501)])
    assert (progress.percent(), progress.now()) == (50.0, "s: update 2500/5000, reward 1.000, 83 min left")


def test_a_damaged_journal_stops_the_stage_before_its_process_starts(followed, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "metr\xff\n')
    with pytest.raises(TrainingError, match="damaged"):
        followed([])


def test_a_sparse_metric_has_its_latest_value_in_the_summary(tmp_path):
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
