"""Run the reward lab: every reward function of every stage, then the sum of each stage.

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
from grpo_tasks.kit.progress import Count
from grpo_tasks.lab.function_checks import SAME_SCORE, FunctionFindings, FunctionTrial
from grpo_tasks.lab.judge_checks import check_judges
from grpo_tasks.lab.probes import (
    COPIED,
    CUT_OFF,
    LISTING,
    PERFECT,
    REPEATED,
    WRONG_ANSWER,
    GroupSample,
    ProbeSet,
    choose_rows,
    finding,
    make_probe_set,
    own_golds,
    passed,
)
from grpo_tasks.lab.report import FIXES, MANY
from grpo_tasks.rewards.contract import RESERVED, shorten
from grpo_tasks.rewards.held_out import reward_columns
from grpo_tasks.rewards.suite import charge_faults, full_score, mean_total, solved, stage_weights, total_scores
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.rewards import LabConfig, RewardsConfig
from schemas.config.run import RunConfig, Scoring
from schemas.config.stage import StageConfig
from schemas.errors import LabError, RewardError
from schemas.metrics import REWARD
from schemas.prompts import PromptRow
from schemas.results.data import LabCheck, LabReport, SignalForecast
from schemas.results.evaluation import histogram

FAULTS = frozenset({"contract", "begins", "faults", "leak"})
"""Checks that stop the run whatever the configuration says."""
TABLE_CHARS = 2_000
TIE = 1e-6
"""Totals that differ by no more than this, relative to their size, tie. The same tolerance as in grpo/advantages.py."""


@dataclass(frozen=True, slots=True)
class LabFindings:
    """Everything that the lab found. The step turns it into a LabReport."""

    checks: list[LabCheck]
    forecasts: list[SignalForecast]
    """One per stage; empty without samples of the base model."""
    probes: pl.DataFrame
    """Every probe with the score of each function (null: does not apply, or broke its contract) and the total of each stage."""
    left_out: list[str]


def run_lab(
    config: RunConfig,
    rows: Sequence[PromptRow],
    base_samples: Sequence[GroupSample] | None = None,
    *,
    log: Path | None = None,
) -> LabFindings:
    """Try every reward function of every stage on all training rows, at least one.

    `base_samples` are groups sampled from the base model for some of the rows; without them there is no forecast. `log` receives
    what the functions print. `ConfigError` where one cannot be loaded, `RewardError` where that ends the worker process.
    """
    stages = [stage for stage in config.stages if stage.rewards]
    names = list(dict.fromkeys(name for stage in stages for name in stage.rewards))
    chosen, longest = choose_rows(rows, config.lab.num_rows), config.rollout.max_completion_length
    with RewardWorker(config.rewards, names, completion=config.completion, tasks=config.task_rewards(), log=log) as worker:
        golds = own_golds(config.lab.gold, chosen, worker)
        probe_set = make_probe_set(config, rows, chosen, golds, base_samples)
        functions, count = {}, Count("testing the reward functions", len(names))
        for name in names:
            settings = config.rewards.resolve(name)
            assert settings is not None, f"unknown reward {name}"
            functions[name] = FunctionTrial(name, settings, probe_set, worker).run(longest)
            count.add()
    forecasts = _forecasts(config, base_samples or [], functions, probe_set)
    judged, not_judged = check_judges(names, config.rewards)
    hidden = {
        name: row
        for row in reversed(rows)
        for name in row.extra.keys() & RESERVED
        if name != "answer" or row.given_answer is not row.extra["answer"]
    }
    detail = "reward functions do not receive the column {0}: one of their arguments has that name; rename the column"
    columns = [finding("data", "columns", detail.format(name), row, warn=True) for name, row in sorted(hidden.items())]
    checks = [*columns, *judged, *(check for function in functions.values() for check in function.checks)]
    checks += [check for stage in stages for check in check_stage(stage, probe_set, functions)]
    checks += check_signal(stages, forecasts, config.lab.min_signal, supervised_first=config.supervised_first)
    left_out, missing = [], len(chosen) - probe_set.num_perfect
    if missing:
        of = "the rows" if missing == len(chosen) else f"{missing} of {len(chosen)} rows"
        left_out.append(f"order, gaming and gold: the lab cannot make a perfect completion for {of}; name your own with lab.gold")
    if not base_samples:
        left_out.append("signal: there are no samples of the base model")
    checks = [weighed(check, config.lab) for check in checks]
    return LabFindings(checks, forecasts, _table(config, probe_set, functions), [*left_out, *not_judged])


def lab_error(report: LabReport) -> LabError:
    """The error that stops the run: function, row and completion of the first failure, and the names of the others."""
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


def forecast(
    stage: str, samples: Sequence[GroupSample], totals: NDArray[np.float64], solved: NDArray[np.float64] | None = None
) -> SignalForecast:
    """Will a stage learn anything? The share of groups, sampled from the base model, whose completions earn different totals.

    A group whose totals tie has zero advantages (grpo/advantages.py). A later stage starts from a better model than the base, so
    its forecast is usually a lower bound. For the N completions of all groups, at least one, group by group: `totals` [N], NaN
    where no function applies; `solved` [N] 1 or 0, NaN where no function applies, None where pass rates are not known.
    """
    ends = np.cumsum([len(sample.completions) for sample in samples])
    # As in training, completions without a total are left out.
    groups = [group[~np.isnan(group)] for group in np.split(totals, ends[:-1])]
    alive = [len(group) > 0 and float(np.ptp(group)) > TIE * max(1.0, float(np.abs(group).max())) for group in groups]
    deviations = [float(group.std(ddof=1)) if len(group) > 1 else 0.0 for group in groups]
    judged = [] if solved is None else [group[~np.isnan(group)] for group in np.split(solved, ends[:-1])]
    return SignalForecast(
        stage=stage,
        groups=len(groups),
        share_with_signal=sum(alive) / len(groups),
        mean_reward=mean_total(totals) or 0.0,
        mean_reward_std=sum(deviations) / len(deviations),
        pass_rates=[] if solved is None else histogram(float(group.mean()) for group in judged if len(group)),
    )


def sampled_signal(
    config: RunConfig, rows: Sequence[PromptRow], samples: pl.DataFrame, groups: Sequence[GroupSample], *, log: Path | None = None
) -> float | None:
    """The share of groups with a signal in the first stage that samples; `groups` are the rows of the table `samples`. None where
    a reward function fails, which the checks report."""
    stage = next(stage for stage in config.stages if stage.rewards)
    scoring = Scoring(rewards=config.rewards, weighted=stage.rewards, reported=[], tasks=config.task_rewards())
    try:
        found = reward_columns(samples, rows, scoring, completion=config.completion, per_prompt=stage.num_generations, log=log)
    except RewardError:
        return None
    totals = found[REWARD].cast(pl.Float64).fill_null(math.nan).to_numpy()
    return forecast(stage.name, groups, totals).share_with_signal


def _forecasts(
    config: RunConfig, samples: Sequence[GroupSample], functions: dict[str, FunctionFindings], probe_set: ProbeSet
) -> list[SignalForecast]:
    perfect = [index for group in probe_set.groups if (index := probe_set.perfect(group)) is not None]
    scores = {name: one.base_scores for name, one in functions.items() if one.base_scores is not None}
    # Conversations that a fault ended count as in training.
    failed = np.array([fault_of(text) is not None for sample in samples for text in sample.conversations], dtype=bool)
    groups = np.repeat(np.arange(len(samples)), [len(sample.completions) for sample in samples])
    found = []
    for stage in config.stages:
        if not stage.rewards or not samples or any(name not in scores for name in stage.rewards):
            continue
        settings = [resolved for name in stage.rewards if (resolved := config.rewards.resolve(name)) is not None]
        full, weights = np.array([full_score(one) for one in settings]), stage_weights(stage, config.rewards)
        totals = stage_totals(stage, config.rewards, scores)
        reached = solved(_matrix(stage, scores), weights, full, config.difficulty.success)
        if failed.any():
            totals = charge_faults(totals[:, None], np.ones(1), failed, groups)[:, 0]
            reached = np.where(failed, 0.0, reached)
        made = forecast(stage.name, samples, totals, reached)
        fitting = {}
        for name, weight, configured in zip(stage.rewards, weights, full, strict=True):
            probes = functions[name].scores or []
            fits = fitting_full_score(scores[name], [probes[index] for index in perfect], config.difficulty.success)
            too_high = made.pass_rates[0] >= made.pass_rates[-1]
            if weight > 0 and fits is not None and (fits < configured if too_high else fits > configured):
                fitting[name] = fits
        found.append(made.model_copy(update={"full_scores": fitting if made.never_or_always >= MANY else {}}))
    return found


def fitting_full_score(sampled: Sequence[float | None], perfect: Sequence[float | None], success: float) -> float | None:
    """A full score by which some completions are solved and others not; None where the scores of the samples say nothing.

    What perfect completions earn, if samples earn less; otherwise one of which the upper quartile of the samples earns the share
    `success`, from which a completion is solved.
    """
    seen = sorted(score for score in sampled if score is not None)
    earned = [score for score in perfect if score is not None]
    if earned and seen and min(earned) > seen[0]:
        value = min(earned)
    else:
        upper = [seen[math.ceil(0.75 * len(seen)) - 1], seen[-1]] if seen else []
        value = next((score / success if score > 0 else score for score in upper if score > seen[0]), 0.0)
    if value == 0.0:
        return None
    # Three digits, rounded down: the completions that earn it still reach it.
    digits = 2 - math.floor(math.log10(abs(value)))
    return round(math.floor(value * 10.0**digits) / 10.0**digits, max(0, digits))


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

    perfect: float
    """NaN where the row has no perfect probe, or no function applies to it."""
    totals: Mapping[str, Sequence[tuple[float, int]]]
    """Those of each role, each with the index of its probe."""
    judges_answers: bool
    ranks_nothing: bool
    """Whether the stage pays every partial completion like the perfect one (the one that is cut off does not count)."""

    def best(self, role: str) -> tuple[float, int]:
        return max(self.totals.get(role, ()), default=(-math.inf, -1))


def stage_totals(stage: StageConfig, rewards: RewardsConfig, scores: Mapping[str, Sequence[float | None]]) -> NDArray[np.float64]:
    """[N] totals of a stage from N scores of each function (None: does not apply); NaN where none of them applies."""
    return total_scores(_matrix(stage, scores), stage_weights(stage, rewards))


def _matrix(stage: StageConfig, scores: Mapping[str, Sequence[float | None]]) -> NDArray[np.float64]:
    """[N, F] scores; NaN where a function does not apply."""
    columns = [[np.nan if score is None else score for score in scores[name]] for name in stage.rewards]
    return np.array(columns, dtype=np.float64).T


def check_stage(stage: StageConfig, probe_set: ProbeSet, findings: Mapping[str, FunctionFindings]) -> list[LabCheck]:
    """The checks of one stage, as far as its rows allow; none when a function broke its contract.

        order   perfect > empty; no partial completion above the perfect one; partial above empty (otherwise a warning)
        empty   a completion without an answer earns nothing
        gaming  no gamed completion earns as much as the perfect one

    A stage that does not check answers may pay for a list of answers, or a copied one, as for any answer. One that ranks no
    partial completion below the perfect one (length only) cannot rank gamed ones below it either, so ties are only a warning.
    """
    scores = {name: findings[name].scores for name in stage.rewards}
    known = {name: values for name, values in scores.items() if values is not None}
    if len(known) < len(scores):
        return []
    totals = stage_totals(stage, probe_set.rewards, known)
    rows = list(_rows(probe_set, totals.tolist()))
    name = f"stage:{stage.name}"
    judged = [row for row in rows if not math.isnan(row.perfect)]
    checks = [_order(name, probe_set, judged), _gaming(name, probe_set, judged)] if judged else []
    total, index = max(row.best("empty") for row in rows)
    detail = f"a completion without an answer earns {total:g}"
    empty = probe_set.finding(name, "empty", detail, index) if total > SAME_SCORE else passed(name, "empty")
    return [*checks[:1], empty, *checks[1:]]


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
        known = [(probe_set.probes[index], totals[index], index) for index in group if not math.isnan(totals[index])]
        by_kind = {probe.kind: total for probe, total, _ in known}
        by_role: dict[str, list[tuple[float, int]]] = {}
        for probe, total, index in known:
            by_role.setdefault(probe.role, []).append((total, index))
        perfect = by_kind.get(PERFECT, math.nan)
        partial = [total for probe, total, _ in known if probe.role == "partial" and probe.kind != CUT_OFF]
        yield _RowTotals(
            perfect,
            by_role,
            judges_answers=by_kind.get(WRONG_ANSWER, math.inf) < perfect - SAME_SCORE,
            ranks_nothing=all(abs(total - perfect) <= SAME_SCORE for total in partial),
        )


def _order(name: str, probe_set: ProbeSet, rows: Sequence[_RowTotals]) -> LabCheck:
    warning: tuple[str, int] | None = None
    for row in rows:
        empty, index = row.best("empty")
        if row.perfect <= empty + SAME_SCORE:
            detail = f"an empty answer earns {empty:g}, the perfect completion {row.perfect:g}"
            return probe_set.finding(name, "order", detail, index)
        partial, index = row.best("partial")
        if partial > row.perfect + SAME_SCORE:
            detail = f"earns {partial:g}, the perfect completion only {row.perfect:g}"
            return probe_set.finding(name, "order", detail, index)
        if warning is not None or index < 0:
            continue
        if row.ranks_nothing:
            nothing = "as much as the perfect completion: this stage teaches neither format nor answers"
            warning = f"earns {partial:g}, {nothing}", index
        elif partial <= empty + SAME_SCORE:
            only = "no more than an empty one: only the perfect one is rewarded"
            warning = f"the best partial completion earns {partial:g}, {only}", index
    return probe_set.finding(name, "order", *warning, warn=True) if warning else passed(name, "order")


def _gaming(name: str, probe_set: ProbeSet, rows: Sequence[_RowTotals]) -> LabCheck:
    tie: LabCheck | None = None
    for row in rows:
        for total, index in row.totals.get("gamed", ()):
            lead = total - row.perfect
            kind = probe_set.probes[index].kind
            may_tie = kind in (LISTING, COPIED) and not row.judges_answers
            # Where the last answer counts, a reply that is repeated is a reply, and gains nothing.
            may_tie |= kind == REPEATED and probe_set.completion.format in ("boxed", "regex")
            if lead < -SAME_SCORE or (may_tie and lead <= SAME_SCORE):
                continue
            detail = f"earns {total:g}, the perfect completion {row.perfect:g}"
            if lead > SAME_SCORE or not row.ranks_nothing:
                return probe_set.finding(name, "gaming", detail, index)
            tie = tie or probe_set.finding(name, "gaming", detail, index, warn=True)
    return tie or passed(name, "gaming")
