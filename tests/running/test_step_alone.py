"""A step outside of a flow: the same folder, record and retries, without Prefect."""

import logging

import pytest

from grpo_tasks.running import step as step_module
from grpo_tasks.running.step import Work, step
from schemas.config.operations import ResourcesConfig
from schemas.errors import ChildDied, DataError
from schemas.results.data import PreparedData


class Recorder:
    """A run whose tracking server is a list."""

    def __init__(self, output):
        self.output, self.fresh, self.resources = output, False, ResourcesConfig()
        self.recorded, self.failed = [], []

    def record(self, result):
        self.recorded.append(result.rows)

    def record_failure(self, step, directory, error):
        self.failed.append((step, directory.name.split("-")[0], str(error)))


CALLS = []


def prepare_data(work: Work, rows: int) -> PreparedData:
    """Write so many rows; a negative number is a fault of the user's, 99 a process that dies once."""
    CALLS.append(rows)
    if rows < 0:
        raise DataError("no rows")
    if rows == 99 and len(CALLS) == 1:
        raise ChildDied("killed")
    (work.directory / "rows.parquet").write_text("row\n" * rows)
    work.artifact("rows", "# Rows")
    return PreparedData(key=work.key, directory=work.directory, seconds=0.0, sources=[], rows=rows)


@pytest.fixture
def run(tmp_path, monkeypatch):
    CALLS.clear()
    monkeypatch.setattr(step_module, "RETRY_DELAY_S", 0.0)
    # As in a command without a flow, although other tests of this process have imported Prefect.
    monkeypatch.setattr("grpo_tasks.running.orchestrator.sys", type("sys", (), {"modules": {}}))
    return Recorder(tmp_path / "runs")


def test_a_finished_step_is_skipped_recorded_again_and_says_so(run, caplog):
    caplog.set_level(logging.INFO, "grpo")
    defined = step()(prepare_data)
    first, again = defined(run, 3), defined(run, 3)
    assert (CALLS, again.directory) == ([3], first.directory)
    assert run.recorded == [3, 3]
    assert ["done" in caplog.messages[0], "unchanged, skipped" in caplog.messages[1]] == [True, True]
    (first.directory / "rows.parquet").write_text("row\n")
    defined(run, 3)
    assert CALLS == [3, 3]


def test_an_error_of_the_users_is_recorded_and_not_retried(run):
    with pytest.raises(DataError, match="no rows"):
        step(retries=2)(prepare_data)(run, -1)
    assert CALLS == [-1]
    assert run.failed == [("prepare_data", "all", "no rows")]


def test_a_dead_process_is_tried_again_as_the_step_says(run):
    assert step(retries=1)(prepare_data)(run, 99).rows == 99
    assert CALLS == [99, 99]
    CALLS.clear()
    run.fresh = True
    with pytest.raises(ChildDied):
        step()(prepare_data)(run, 99)
