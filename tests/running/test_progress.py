"""How far a step has come: what the listener hears, what Prefect shows, and what stands in the logs."""

import logging

import pytest

from grpo_tasks.kit.progress import Count, Progress, listening, report
from grpo_tasks.running import progress as progress_module
from grpo_tasks.running.progress import StageProgress, StepProgress
from grpo_tasks.stage.journal import Journal
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.stage import StageConfig
from schemas.errors import TrainingError
from tests.processes.waiting import until


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


@pytest.fixture
def quick(monkeypatch):
    """The thread of a step works at once, and again and again."""
    for name in ("POLL_S", "FIRST_S", "SHOW_S", "LOG_S"):
        monkeypatch.setattr(progress_module, name, 0.01)
    monkeypatch.setattr(progress_module, "run_logger", lambda: logging.getLogger("progress"))
    shown = []

    def show(key, data, text, known):
        shown.append((key, data, text))
        known[key] = "its id"

    monkeypatch.setattr(progress_module, "show_artifact", show)
    return shown


def test_a_step_shows_its_work_in_prefect_and_in_its_log(quick, tmp_path, caplog):
    caplog.set_level(logging.INFO, "progress")
    with StepProgress("evaluate_model-base", tmp_path, number=3, steps=14):
        count = Count("sampling", 4, "completions")
        count.add()
        until(lambda: any("1/4" in text for _, _, text in quick) and (tmp_path / "log.txt").exists() and caplog.messages)
    line = "3/14 evaluate_model-base: sampling 1/4 completions"
    assert ("progress-evaluate-model-base", 25.0, line) in quick
    assert quick[-1] == ("progress-evaluate-model-base", 100.0, "done")
    assert line in (tmp_path / "log.txt").read_text()
    assert caplog.messages[0].startswith(line), "nobody listens, so the log says it"


def test_who_listens_hears_of_a_step_before_it_works(quick, tmp_path, caplog):
    caplog.set_level(logging.INFO, "progress")
    heard = []
    with listening(heard.append), StepProgress("merge_adapter", tmp_path, number=9, steps=14):
        assert [one.line() for one in heard] == ["9/14 merge_adapter"]
        report(Progress("loading the model"))
        until((tmp_path / "log.txt").exists)
    assert [one.line() for one in heard[1:]] == [
        "9/14 merge_adapter: loading the model",
    ]
    assert not caplog.messages


def test_a_stage_shows_its_updates_with_figures_and_time_left(followed):
    heard = []
    with listening(heard.append):
        followed(range(1, 8), max_steps=10)
    assert heard[0].line() == "update 0/10"
    assert heard[-1].line().startswith("update 7/10, reward 0.700, kl 0.010, ")
    assert heard[-1].line().endswith(" left")
    assert heard[-1].percent == 70.0


def test_the_time_left_is_judged_by_the_last_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "run_logger", lambda: logging.getLogger("progress"))
    stage = StageConfig(name="s", rewards=["format"], max_steps=5000)
    heard = []
    with listening(heard.append):
        progress = StageProgress(stage, StageDir(tmp_path), ship=list, ship_every_s=1000.0)
        assert (progress.percent(), progress.now().line()) == (0.0, "update 0/5,000")
        progress._hear(Progress("loading the model"))
        assert heard[-1].line() == "update 0/5,000, loading the model"
        progress._remember([{"step": step, "timestamp_ms": 2000 * step, "metrics": {"reward": 1.0}} for step in range(1, 2501)])
        assert (progress.percent(), progress.now().line()) == (50.0, "update 2,500/5,000, reward 1.000, 83 min left")
        # The last update came long ago.
        progress._hear(Progress("sampling", 12, 64, "completions"))
        assert heard[-1].line() == "update 2,500/5,000, sampling 12/64 completions, 83 min left"


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
