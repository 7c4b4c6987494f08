"""A step runs, or is skipped because its folder holds what it wrote; both inside a real flow."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prefect import flow

from grpo_tasks.running.step import Work, step
from schemas.config.operations import ResourcesConfig
from schemas.errors import ChildDied, DataError
from schemas.results.data import PreparedData

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("running")]


@dataclass
class Recorder:
    """A run whose tracking server is a list."""

    output: Path
    fresh: bool = False
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    recorded: list = field(default_factory=list)
    failed: list = field(default_factory=list)

    def record(self, result):
        self.recorded.append(result.rows)

    def record_failure(self, step, directory, error):
        self.failed.append((step, directory, str(error)))


CALLS = []
"""Inputs of the bodies that ran. They are named after real steps, whose files count for the content key."""


def prepare_data(work: Work, rows: int) -> PreparedData:
    """Write so many rows."""
    CALLS.append(rows)
    (work.directory / "rows.parquet").write_text("row\n" * rows)
    return PreparedData(key=work.key, directory=work.directory, seconds=0.0, sources=[], rows=rows)


def validate_data(work: Work, rows: int) -> PreparedData:
    """Fail as the user's data does, or as a process does that was killed."""
    CALLS.append(rows)
    raise DataError("no rows") if rows == 0 else ChildDied("killed")


@pytest.fixture
def run(server, tmp_path):
    CALLS.clear()
    return Recorder(tmp_path / "runs")


def in_flow(defined, run, *inputs):
    """Call the step in a flow; its result."""

    @flow(name="one-step")
    def one_step():
        return defined(run, *inputs)

    return one_step()


def test_a_finished_step_is_skipped_until_its_inputs_or_its_files_change(run):
    defined = step()(prepare_data)
    first = in_flow(defined, run, 3)
    again = in_flow(defined, run, 3)
    assert (CALLS, again.directory) == ([3], first.directory)
    other = in_flow(defined, run, 4)
    assert (CALLS, other.directory.parent) == ([3, 4], first.directory.parent)
    (first.directory / "rows.parquet").write_text("row\n")
    in_flow(defined, run, 3)
    assert CALLS == [3, 4, 3]
    assert (first.directory / "rows.parquet").read_text() == "row\n" * 3
    run.fresh = True
    in_flow(defined, run, 3)
    assert CALLS == [3, 4, 3, 3]
    assert run.recorded == [3, 3, 4, 3, 3], "a skipped step is recorded too"


def test_a_step_that_is_not_cached_runs_every_time(run):
    defined = step(cached=False)(prepare_data)
    for _ in range(2):
        in_flow(defined, run, 3)
    assert CALLS == [3, 3]


def test_an_error_of_the_users_is_recorded_and_not_retried(run):
    with pytest.raises(DataError, match="no rows"):
        in_flow(step(retries=2)(validate_data), run, 0)
    assert CALLS == [0]
    [(name, directory, error)] = run.failed
    assert (name, error) == ("validate_data", "no rows")
    assert not (directory / "result.json").exists()


def test_a_step_whose_process_died_is_tried_again(run):
    with pytest.raises(ChildDied):
        in_flow(step(retries=1)(validate_data), run, 1)
    assert CALLS == [1, 1]
