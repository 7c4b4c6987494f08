"""Run the reward lab: every reward function of every stage is tried before any training.

    rows -> probes -----------> each function (function_checks.py) -> sum of each stage (stage_checks.py) -> checks
    samples of the base model ----------------------------------------------> signal of each stage (forecast.py)

A fault (the check contract) stops the run. Every other finding is an opinion: it warns, and stops the run when `lab.strict` is
set. `lab.ignore_checks` silences opinions and turns faults into warnings, by CHECK or FUNCTION/CHECK.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from grpo_tasks.content.conversations import fault_of
from grpo_tasks.content.places import row_place
from grpo_tasks.lab.forecast import GroupSample, forecast
from grpo_tasks.lab.function_checks import FunctionFindings, check_function
from grpo_tasks.lab.judge_checks import check_judges
from grpo_tasks.lab.probe_set import ProbeSet, choose_rows, make_probe_set, own_golds
from grpo_tasks.lab.report import FIXES
from grpo_tasks.lab.stage_checks import check_signal, check_stage, stage_solved, stage_totals
from grpo_tasks.rewards.contract import RESERVED, Row, shorten
from grpo_tasks.rewards.totals import charge_faults
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import LabConfig, RewardConfig
from schemas.config.run import RunConfig
from schemas.errors import LabError
from schemas.results.lab import LabCheck, LabReport, SignalForecast

FAULTS = frozenset({"contract", "begins", "faults", "leak"})
"""Checks that stop the run whatever the configuration says."""
TABLE_CHARS = 2_000
"""Characters of a completion kept in the table of probes."""


@dataclass(frozen=True, slots=True)
class LabFindings:
    """Everything that the lab found. The step turns it into a LabReport."""

    checks: list[LabCheck]
    forecasts: list[SignalForecast]
    """One per stage; empty without samples of the base model."""
    probes: pl.DataFrame
    """Every probe with the score of each function (null: does not apply, or broke its contract) and the total of each stage."""
    left_out: list[str]
    """Checks that could not be made, each with its reason."""


def run_lab(
    config: RunConfig,
    rows: Sequence[Row],
    base_samples: Sequence[GroupSample] | None = None,
    *,
    log: Path | None = None,
) -> LabFindings:
    """Try every reward function of every stage.

    Args:
        config: the run; its section `lab` says how much is tried. No function may hang on a text of the longest completion that
            its section `rollout` allows.
        rows: all training rows, at least one.
        base_samples: groups sampled from the base model for some of the rows. Without them there is no forecast.
        log: file that receives what the functions print. None: their output is discarded.

    Raises:
        ConfigError: a function cannot be loaded.
        RewardError: loading the functions ends the worker process.
    """
    stages = [stage for stage in config.stages if stage.rewards]
    names = list(dict.fromkeys(name for stage in stages for name in stage.rewards))
    chosen, longest = choose_rows(rows, config.lab.num_rows), config.rollout.max_completion_length
    with RewardWorker(config.rewards, names, completion=config.completion, tasks=config.task_rewards(), log=log) as worker:
        golds = own_golds(config.lab.gold, chosen, worker)
        probe_set = make_probe_set(config, rows, chosen, golds, base_samples)
        functions = {
            name: check_function(name, _settings(config, name), probe_set, worker, max_completion_length=longest)
            for name in names
        }
    forecasts = _forecasts(config, base_samples or [], functions)
    judged, not_judged = check_judges(names, config.rewards)
    checks = [*_columns(rows), *judged, *(check for function in functions.values() for check in function.checks)]
    checks += [check for stage in stages for check in check_stage(stage, probe_set, functions)]
    checks += check_signal(stages, forecasts, config.lab.min_signal, supervised_first=config.supervised_first)
    checks = [weighed(check, config.lab) for check in checks]
    return LabFindings(
        checks, forecasts, _table(config, probe_set, functions), [*_left_out(probe_set, base_samples), *not_judged]
    )


def lab_error(report: LabReport) -> LabError:
    """The error that stops the run: function, row and completion of the first failure, and the names of the others.

    Args:
        report: a report with at least one failure.
    """
    first, *others = report.failures
    message = f"{first.function} fails the check {first.check}: {first.detail}"
    if others:
        message += f" (and {len(others)} more: {', '.join(f'{check.function}/{check.check}' for check in others)})"
    row_id = f" (prompt_id {first.prompt_id})" if first.prompt_id else ""
    row = f"{first.place}{row_id}, probe {first.probe}, completion {first.completion!r}" if first.place else ""
    called = f"called with {first.arguments}" if first.arguments else ""
    ignore = f"or add {first.function}/{first.check} to lab.ignore_checks"
    return LabError(
        message,
        place="; ".join(filter(None, [first.source, row, called])),
        fix=f"{first.fix or FIXES[first.check]}; {ignore}; report: {report.directory / 'report.md'}",
    )


def _columns(rows: Sequence[Row]) -> list[LabCheck]:
    """A warning for each column that no function receives, because its name is reserved."""
    hidden = {name: row for row in reversed(rows) for name in row.extra.keys() & RESERVED}
    return [
        LabCheck(
            function="data",
            check="columns",
            outcome="warned",
            detail=f"reward functions do not receive the column {name}: one of their arguments has that name; rename the column",
            prompt_id=row.prompt_id,
            place=row_place(row.source, row.line),
        )
        for name, row in sorted(hidden.items())
    ]


def _settings(config: RunConfig, name: str) -> RewardConfig:
    settings = config.rewards.resolve(name)
    assert settings is not None, f"unknown reward {name}"
    return settings


def weighed(check: LabCheck, lab: LabConfig) -> LabCheck:
    """The check with its consequence: faults stop the run, opinions warn unless `lab.strict` is set."""
    if check.outcome == "passed":
        return check
    ignored = check.check in lab.ignore_checks or f"{check.function}/{check.check}" in lab.ignore_checks
    if check.check in FAULTS:
        outcome = "warned" if ignored else check.outcome
    else:
        outcome = "ignored" if ignored else check.outcome if lab.strict else "warned"
    return check.model_copy(update={"outcome": outcome})


def _left_out(probe_set: ProbeSet, base_samples: Sequence[GroupSample] | None) -> list[str]:
    missing = len(probe_set.chosen) - probe_set.num_perfect
    left = []
    if missing:
        rows = "the rows" if missing == len(probe_set.chosen) else f"{missing} of {len(probe_set.chosen)} rows"
        left.append(f"order, gaming and gold: the lab cannot make a perfect completion for {rows}; name your own with lab.gold")
    if not base_samples:
        left.append("signal: there are no samples of the base model")
    return left


def _forecasts(config: RunConfig, samples: Sequence[GroupSample], functions: dict[str, FunctionFindings]) -> list[SignalForecast]:
    scores = {name: one.base_scores for name, one in functions.items() if one.base_scores is not None}
    share, found = config.difficulty.success, []
    for stage in config.stages:
        if stage.rewards and samples and all(name in scores for name in stage.rewards):
            totals, reached = stage_totals(stage, config.rewards, scores), stage_solved(stage, config.rewards, scores, share)
            found.append(forecast(stage.name, samples, *_with_faults(samples, totals, reached)))
    return found


def _with_faults(
    samples: Sequence[GroupSample], totals: NDArray[np.float64], reached: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Totals and verdicts in which conversations that a fault ended count as in training."""
    failed = np.array([fault_of(text) is not None for sample in samples for text in sample.conversations], dtype=bool)
    if not failed.any():
        return totals, reached
    groups = np.repeat(np.arange(len(samples)), [len(sample.completions) for sample in samples])
    charged = charge_faults(totals[:, None], np.ones(1), failed, groups)[:, 0]
    return charged, np.where(failed, 0.0, reached)


def _table(config: RunConfig, probe_set: ProbeSet, functions: dict[str, FunctionFindings]) -> pl.DataFrame:
    count = len(probe_set.probes)
    rows = [probe_set.row(index) for index in range(count)]
    known = {name: one.scores for name, one in functions.items() if one.scores is not None}
    nothing: list[float | None] = [None] * count
    totals = {
        f"total_{stage.name}": pl.Series(stage_totals(stage, config.rewards, known), nan_to_null=True)
        for stage in config.stages
        if stage.rewards and all(name in known for name in stage.rewards)
    }
    return pl.DataFrame(
        {
            "prompt_id": [row.prompt_id for row in rows],
            "source": [row.source for row in rows],
            "line": [row.line for row in rows],
            "answer": [row.answer for row in rows],
            "probe": [probe.kind for probe in probe_set.probes],
            "role": [probe.role for probe in probe_set.probes],
            "completion": [shorten(probe.text, TABLE_CHARS) for probe in probe_set.probes],
            **{f"reward_{name}": pl.Series(known.get(name, nothing), dtype=pl.Float64) for name in functions},
            **totals,
        }
    )
