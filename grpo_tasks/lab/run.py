"""Run the reward lab: every reward function of every stage is tried before any training.

    rows -> probes -----------> each function (function_checks.py) -> sum of each stage -> checks
    samples of the base model ----------------------------------------------> signal of each stage (forecast.py)

A fault (the check contract) stops the run. Every other finding is an opinion: it warns, and stops the run when `lab.strict` is
set. `lab.ignore_checks` silences opinions and turns faults into warnings, by CHECK or FUNCTION/CHECK.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from grpo_tasks.content.conversations import fault_of
from grpo_tasks.content.places import row_place
from grpo_tasks.lab.forecast import GroupSample, forecast
from grpo_tasks.lab.function_checks import SAME_SCORE, FunctionFindings, check_function
from grpo_tasks.lab.judge_checks import check_judges
from grpo_tasks.lab.probe_set import ProbeSet, choose_rows, finding, make_probe_set, own_golds, passed
from grpo_tasks.lab.probes import CUT_OFF, LISTING, PERFECT, WRONG_ANSWER
from grpo_tasks.lab.report import FIXES
from grpo_tasks.rewards.contract import RESERVED, shorten
from grpo_tasks.rewards.suite import full_score
from grpo_tasks.rewards.totals import charge_faults, solved, stage_weights, total_scores
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import LabConfig, RewardConfig, RewardsConfig
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import LabError
from schemas.prompts import PromptRow
from schemas.results.lab import LabCheck, LabReport, SignalForecast

FAULTS = frozenset({"contract", "begins", "faults", "leak"})
"""Checks that stop the run whatever the configuration says."""
TABLE_CHARS = 2_000
"""Characters of a completion kept in the table of probes."""

_NOTHING = (-math.inf, -1)
"""The best of no probes."""


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
    rows: Sequence[PromptRow],
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


def _columns(rows: Sequence[PromptRow]) -> list[LabCheck]:
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


@dataclass(frozen=True, slots=True)
class _RowTotals:
    """The totals of the stage for the probes of one row."""

    first: int
    """Index of the row's first probe in the probe set."""
    roles: Sequence[str]
    kinds: Sequence[str]
    totals: Sequence[float]

    @property
    def perfect(self) -> float:
        return self.totals[self.kinds.index(PERFECT)]

    def of(self, role: str) -> list[tuple[float, int]]:
        """Totals of the probes of one role, each with its index in the probe set."""
        return [
            (total, self.first + offset)
            for offset, (total, its_role) in enumerate(zip(self.totals, self.roles, strict=True))
            if its_role == role and not math.isnan(total)
        ]

    @property
    def has_perfect(self) -> bool:
        return PERFECT in self.kinds and not math.isnan(self.perfect)

    @property
    def best_empty(self) -> tuple[float, int]:
        return max(self.of("empty"), default=_NOTHING)

    @property
    def best_partial(self) -> tuple[float, int]:
        return max(self.of("partial"), default=_NOTHING)

    @property
    def judges_answers(self) -> bool:
        if WRONG_ANSWER not in self.kinds:
            return False
        return self.totals[self.kinds.index(WRONG_ANSWER)] < self.perfect - SAME_SCORE

    @property
    def ranks_nothing(self) -> bool:
        """Whether the stage pays every partial completion like the perfect one (the one that is cut off does not count)."""
        return all(abs(total - self.perfect) <= SAME_SCORE for total, index in self.of("partial") if not self._cut_off(index))

    def _cut_off(self, index: int) -> bool:
        return self.kinds[index - self.first] == CUT_OFF


def stage_totals(stage: StageConfig, rewards: RewardsConfig, scores: Mapping[str, Sequence[float | None]]) -> NDArray[np.float64]:
    """[N] totals of a stage with its configured weights; NaN where none of its functions applies.

    Args:
        stage: names its functions.
        rewards: holds their weights.
        scores: N scores of each function by name; None where it does not apply.
    """
    return total_scores(_matrix(stage, scores), stage_weights(stage, rewards))


def stage_solved(
    stage: StageConfig, rewards: RewardsConfig, scores: Mapping[str, Sequence[float | None]], share: float
) -> NDArray[np.float64]:
    """[N] 1 for a completion that reaches this share of the full reward of the stage, else 0 (rewards/totals.py `solved`)."""
    settings = [resolved for name in stage.rewards if (resolved := rewards.resolve(name)) is not None]
    full = np.array([full_score(one) for one in settings])
    return solved(_matrix(stage, scores), stage_weights(stage, rewards), full, share)


def _matrix(stage: StageConfig, scores: Mapping[str, Sequence[float | None]]) -> NDArray[np.float64]:
    """[N, F] scores; NaN where a function does not apply."""
    columns = [[np.nan if score is None else score for score in scores[name]] for name in stage.rewards]
    return np.array(columns, dtype=np.float64).T


def check_stage(stage: StageConfig, probe_set: ProbeSet, findings: Mapping[str, FunctionFindings]) -> list[LabCheck]:
    """The checks order, empty and gaming of one stage, as far as its rows allow; none when a function broke its contract.

        order   perfect > empty; no partial completion above the perfect one; partial above empty (otherwise a warning)
        empty   a completion without an answer earns nothing
        gaming  no gamed completion earns as much as the perfect one

    A stage that does not check answers may pay for a list of answers as for any answer. One that ranks no partial completion
    below the perfect one (length only) cannot rank gamed ones below it either, so ties are only a warning there.
    """
    scores = {name: findings[name].scores for name in stage.rewards}
    known = {name: values for name, values in scores.items() if values is not None}
    if len(known) < len(scores):
        return []
    totals = stage_totals(stage, probe_set.rewards, known)
    rows = list(_rows(probe_set, totals.tolist()))
    name = f"stage:{stage.name}"
    judged = [row for row in rows if row.has_perfect]
    checks = [_order(name, probe_set, judged), _gaming(name, probe_set, judged)] if judged else []
    return [*checks[:1], _empty(name, probe_set, rows), *checks[1:]]


def check_signal(
    stages: Sequence[StageConfig], forecasts: Sequence[SignalForecast], min_signal: float, *, supervised_first: bool = False
) -> Iterator[LabCheck]:
    """Whether enough groups of each stage carry signal. Too few fail the first stage and are a warning for the others.

    With `supervised_first` they are a warning everywhere: demonstrations change the policy before its groups matter.
    """
    for one in forecasts:
        name = f"stage:{one.stage}"
        detail = f"the completions of {one.share_with_signal:.0%} of {one.groups} groups of the base model differ in reward"
        if one.share_with_signal >= min_signal:
            yield passed(name, "signal", detail)
            continue
        first = one.stage == stages[0].name and not supervised_first
        too_few = f"{detail}, less than lab.min_signal ({min_signal:.0%})"
        yield LabCheck(function=name, check="signal", outcome="failed" if first else "warned", detail=too_few)


def _rows(probe_set: ProbeSet, totals: Sequence[float]) -> Iterator[_RowTotals]:
    for group in probe_set.groups:
        probes = [probe_set.probes[index] for index in group]
        yield _RowTotals(
            group[0], [probe.role for probe in probes], [probe.kind for probe in probes], [totals[index] for index in group]
        )


def _order(name: str, probe_set: ProbeSet, rows: Sequence[_RowTotals]) -> LabCheck:
    for row in rows:
        empty, index = row.best_empty
        if row.perfect <= empty + SAME_SCORE:
            return _example(
                name, "order", f"an empty answer earns {empty:g}, the perfect completion {row.perfect:g}", probe_set, index
            )
        partial, index = row.best_partial
        if partial > row.perfect + SAME_SCORE:
            return _example(name, "order", f"earns {partial:g}, the perfect completion only {row.perfect:g}", probe_set, index)
    return _order_warning(name, probe_set, rows) or passed(name, "order")


def _order_warning(name: str, probe_set: ProbeSet, rows: Sequence[_RowTotals]) -> LabCheck | None:
    for row in rows:
        partial, index = row.best_partial
        if index < 0:
            continue
        if row.ranks_nothing:
            detail = f"earns {partial:g}, as much as the perfect completion: this stage teaches neither format nor answers"
            return _example(name, "order", detail, probe_set, index, warn=True)
        if partial <= row.best_empty[0] + SAME_SCORE:
            detail = f"the best partial completion earns {partial:g}, no more than an empty one: only the perfect one is rewarded"
            return _example(name, "order", detail, probe_set, index, warn=True)
    return None


def _empty(name: str, probe_set: ProbeSet, rows: Sequence[_RowTotals]) -> LabCheck:
    total, index = max((row.best_empty for row in rows), default=_NOTHING)
    if total > SAME_SCORE:
        return _example(name, "empty", f"a completion without an answer earns {total:g}", probe_set, index)
    return passed(name, "empty")


def _gaming(name: str, probe_set: ProbeSet, rows: Sequence[_RowTotals]) -> LabCheck:
    tie: LabCheck | None = None
    for row in rows:
        for total, index in row.of("gamed"):
            lead = total - row.perfect
            listing = probe_set.probes[index].kind == LISTING and not row.judges_answers
            if lead < -SAME_SCORE or (listing and lead <= SAME_SCORE):
                continue
            detail = f"earns {total:g}, the perfect completion {row.perfect:g}"
            if lead > SAME_SCORE or not row.ranks_nothing:
                return _example(name, "gaming", detail, probe_set, index)
            tie = tie or _example(name, "gaming", detail, probe_set, index, warn=True)
    return tie or passed(name, "gaming")


def _example(name: str, check: str, detail: str, probe_set: ProbeSet, index: int, *, warn: bool = False) -> LabCheck:
    probe = probe_set.probes[index]
    return finding(name, check, detail, probe_set.row(index), probe=probe.kind, text=probe.text, warn=warn)
