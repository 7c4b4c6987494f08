"""A step runs, or is skipped because its folder holds what it wrote: in a flow, and in the same way without Prefect."""

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prefect import flow

from grpo_tasks.rollout.parts import PARTS
from grpo_tasks.running import step as step_module
from grpo_tasks.running.step import Work, step
from grpo_tasks.steps.evaluate_model import evaluate_model
from grpo_tasks.steps.probe_rewards import probe_rewards
from schemas.config.operations import ResourcesConfig
from schemas.errors import ChildDied, DataError
from schemas.results.data import PreparedData


@dataclass
class Recorder:
    """A run whose tracking server is a list."""

    output: Path
    fresh: bool = False
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    recorded: list = field(default_factory=list)
    failed: list = field(default_factory=list)
    steps: int = 2
    begun: int = 0

    def record(self, result):
        self.recorded.append(result.rows)

    def record_failure(self, step, directory, error):
        self.failed.append((step, directory, str(error)))


CALLS = []
"""Inputs of the bodies that ran."""


def prepare_data(work: Work, rows: int) -> PreparedData:
    """Write so many rows; none is a fault of the user's, 99 a process that dies once, 98 one that always dies."""
    CALLS.append(rows)
    if rows == 0:
        raise DataError("no rows")
    if rows == 98 or CALLS == [99]:
        raise ChildDied("killed")
    (work.directory / "rows.parquet").write_text("row\n" * rows)
    work.artifact("rows", "# Rows")
    return PreparedData(key=work.key, directory=work.directory, seconds=0.0, sources=[], rows=rows)


@pytest.fixture
def run(tmp_path):
    CALLS.clear()
    return Recorder(tmp_path / "runs")


@pytest.fixture(params=["alone", pytest.param("in a flow", marks=[pytest.mark.long, pytest.mark.xdist_group("running")])])
def call(request, monkeypatch):
    monkeypatch.setattr(step_module, "RETRY_DELAY_S", 0.0)
    if request.param == "alone":
        # As in a command without a flow, although other tests of this process have imported Prefect.
        monkeypatch.setattr("grpo_tasks.running.orchestrator.sys", type("sys", (), {"modules": {}}))
        return lambda defined, run, *inputs: defined(run, *inputs)
    request.getfixturevalue("server")
    return lambda defined, run, *inputs: flow(name="one-step")(lambda: defined(run, *inputs))()


def test_a_finished_step_is_skipped_until_its_inputs_or_its_files_change(call, run):
    defined = step()(prepare_data)
    first = call(defined, run, 3)
    again = call(defined, run, 3)
    assert (CALLS, again.directory) == ([3], first.directory)
    other = call(defined, run, 4)
    assert (CALLS, other.directory.parent) == ([3, 4], first.directory.parent)
    (first.directory / "rows.parquet").write_text("row\n")
    call(defined, run, 3)
    assert CALLS == [3, 4, 3]
    assert (first.directory / "rows.parquet").read_text() == "row\n" * 3
    run.fresh = True
    call(defined, run, 3)
    assert CALLS == [3, 4, 3, 3]
    assert run.recorded == [3, 3, 4, 3, 3], "a skipped step is recorded too"


def test_a_step_that_is_not_cached_runs_every_time(call, run):
    defined = step(cached=False)(prepare_data)
    for _ in range(2):
        call(defined, run, 3)
    assert CALLS == [3, 3]


def test_an_error_of_the_users_is_recorded_and_not_retried(call, run):
    with pytest.raises(DataError, match="no rows"):
        call(step(retries=2)(prepare_data), run, 0)
    assert CALLS == [0]
    [(name, directory, error)] = run.failed
    assert (name, error) == ("prepare_data", "no rows")
    assert not (directory / "result.json").exists()


def test_a_dead_process_is_tried_again_as_the_step_says(call, run):
    assert call(step(retries=1)(prepare_data), run, 99).rows == 99
    assert CALLS == [99, 99]
    with pytest.raises(ChildDied):
        call(step(retries=1)(prepare_data), run, 98)
    assert CALLS == [99, 99, 98, 98]


def test_what_an_unfinished_step_keeps_is_there_again_but_not_afresh(run, monkeypatch):
    monkeypatch.setattr("grpo_tasks.running.orchestrator.sys", type("sys", (), {"modules": {}}))
    seen = []

    def prepare_data(work: Work, rows: int) -> PreparedData:
        seen.append(sorted(path.name for path in work.directory.iterdir()))
        (work.directory / "parts").mkdir(exist_ok=True)
        (work.directory / "other").write_text("")
        raise DataError("killed")

    defined = step(keeps=("parts",))(prepare_data)
    for fresh in (False, False, True):
        run.fresh = fresh
        with pytest.raises(DataError):
            defined(run, 3)
    assert seen == [[], ["parts"], []]
    assert evaluate_model.keeps == probe_rewards.keeps == (PARTS,)


def test_the_log_says_what_was_done_and_what_was_skipped(run, caplog, monkeypatch):
    monkeypatch.setattr("grpo_tasks.running.orchestrator.sys", type("sys", (), {"modules": {}}))
    caplog.set_level(logging.INFO, "grpo")
    for _ in range(2):
        step()(prepare_data)(run, 3)
    done, skipped = caplog.messages
    assert re.fullmatch(r"1/2 prepare_data: done in \d+\.\d s", done)
    assert skipped == "2/2 prepare_data: unchanged, skipped"
