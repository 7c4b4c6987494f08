"""The reward lab: every reward of every stage tried before any training. A smoke test, and no proof of a good reward.

    rows -> probes ----> each function (trial.py) ----> each stage's sum (stages.py) ----> checks
    base model's samples ----------------------------------------------------------> forecasts (forecast.py)

A check that fails stops the run, unless `lab.ignore_checks` names it (check, or function/check): then it warns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from grpo_tasks.lab.forecast import GroupSample, forecast
from grpo_tasks.lab.function_checks import Trial, try_function
from grpo_tasks.lab.probe_set import Bench, lay_bench
from grpo_tasks.lab.stage_checks import stage_totals, try_signal, try_stage
from grpo_tasks.rewards.contract import RESERVED, Row, shorten
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import RewardConfig
from schemas.config.run import LabInputs, RunConfig
from schemas.errors import LabError
from schemas.results import LabCheck, LabReport, SignalForecast

TABLE_CHARS = 2_000
"""Characters of a completion kept in the table of probes."""


@dataclass(frozen=True, slots=True)
class LabFindings:
    """What the lab found; the step makes a LabReport of it."""

    checks: list[LabCheck]
    forecasts: list[SignalForecast]
    """Empty without samples of the base model."""
    probes: pl.DataFrame
    """Every probe with every function's score (null: does not apply, or contract broken) and every stage's total."""


def run_lab(
    config: LabInputs | RunConfig,
    rows: Sequence[Row],
    base_samples: Sequence[GroupSample] | None = None,
    *,
    log: Path | None = None,
) -> LabFindings:
    """Try every reward function of every stage.

    Args:
        config: the run; `lab` says how much is tried.
        rows: all training rows, at least one.
        base_samples: groups sampled from the base model for some of the rows; without them nothing is forecast.
        log: file that takes what the functions print; None: nothing of it is kept.

    Raises:
        ConfigError: a function cannot be loaded.
        RewardError: loading the functions takes the worker down.
    """
    names = list(dict.fromkeys(name for stage in config.stages for name in stage.rewards))
    bench = lay_bench(config.rewards, config.lab, rows, base_samples)
    with RewardWorker(config.rewards, names, log=log) as worker:
        trials = {name: try_function(name, _settings(config, name), bench, worker) for name in names}
    forecasts = _forecasts(config, base_samples or [], trials)
    checks = [*_columns(rows), *(check for trial in trials.values() for check in trial.checks)]
    checks += [check for stage in config.stages for check in try_stage(stage, bench, trials)]
    checks += try_signal(config.stages, forecasts, config.lab.min_signal)
    return LabFindings([_lenient(check, config.lab.ignore_checks) for check in checks], forecasts, _table(config, bench, trials))


def lab_error(report: LabReport) -> LabError:
    """The error that stops a run whose report has failures: function, row and completion of the first, count of the others."""
    first, *others = report.failures
    message = f"{first.function} fails the check {first.check}: {first.detail}"
    if others:
        message += f" (and {len(others)} more: {', '.join(f'{check.function}/{check.check}' for check in others)})"
    row_id = f" (prompt_id {first.prompt_id})" if first.prompt_id else ""
    row = f"{first.place}{row_id}, probe {first.probe}, completion {first.completion!r}" if first.place else ""
    fix = f"fix the function, or add {first.function}/{first.check} to lab.ignore_checks"
    return LabError(message, place=row, fix=f"{fix}; report: {report.directory / 'report.md'}")


def _columns(rows: Sequence[Row]) -> list[LabCheck]:
    """A warning for the columns that no function gets to see."""
    hidden = {name: row for row in reversed(rows) for name in row.extra.keys() & RESERVED}
    return [
        LabCheck(
            function="data",
            check="columns",
            outcome="warned",
            detail=f"the column {name} is left out: every reward function gets an argument of that name; rename the column",
            prompt_id=row.prompt_id,
            place=f"{row.source}:{row.line}",
        )
        for name, row in sorted(hidden.items())
    ]


def _settings(config: LabInputs | RunConfig, name: str) -> RewardConfig:
    settings = config.rewards.resolve(name)
    assert settings is not None, f"unknown reward {name}"
    return settings


def _lenient(check: LabCheck, ignored: Sequence[str]) -> LabCheck:
    named = check.check in ignored or f"{check.function}/{check.check}" in ignored
    return check.model_copy(update={"outcome": "warned"}) if named and check.outcome == "failed" else check


def _forecasts(config: LabInputs | RunConfig, samples: Sequence[GroupSample], trials: dict[str, Trial]) -> list[SignalForecast]:
    scores = {name: trial.base_scores for name, trial in trials.items() if trial.base_scores is not None}
    return [
        forecast(stage.name, samples, stage_totals(stage, config.rewards, scores))
        for stage in config.stages
        if samples and all(name in scores for name in stage.rewards)
    ]


def _table(config: LabInputs | RunConfig, bench: Bench, trials: dict[str, Trial]) -> pl.DataFrame:
    count = len(bench.probes)
    rows = [bench.row(index) for index in range(count)]
    known = {name: trial.scores for name, trial in trials.items() if trial.scores is not None}
    nothing: list[float | None] = [None] * count
    totals = {
        f"total_{stage.name}": pl.Series(stage_totals(stage, config.rewards, known), nan_to_null=True)
        for stage in config.stages
        if all(name in known for name in stage.rewards)
    }
    return pl.DataFrame(
        {
            "prompt_id": [row.prompt_id for row in rows],
            "source": [row.source for row in rows],
            "line": [row.line for row in rows],
            "answer": [row.answer for row in rows],
            "probe": [probe.kind for probe in bench.probes],
            "role": [probe.role for probe in bench.probes],
            "completion": [shorten(probe.text, TABLE_CHARS) for probe in bench.probes],
            **{f"reward_{name}": pl.Series(known.get(name, nothing), dtype=pl.Float64) for name in trials},
            **totals,
        }
    )
