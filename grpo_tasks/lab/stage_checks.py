"""The checks of a stage: the weighted sum of its rewards, which is what the completions of a group compete for.

    order   perfect > empty; no partial completion above the perfect one; partial above empty (otherwise a warning)
    empty   a completion without an answer earns nothing
    gaming  no gamed completion earns as much as the perfect one
    signal  enough groups of the base model's samples differ in reward (later stages only get a warning)

Order and gaming need perfect completions, and look only at rows that have one. A completion to which no function of the stage
applies has no total, and is left out as in training.

A stage that does not check answers (format only) may pay for a list of answers as for any answer. A stage that ranks no partial
completion below the perfect one (length only) cannot rank gamed ones below it either, so ties are only a warning there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_tasks.lab.function_checks import SAME_SCORE, FunctionFindings
from grpo_tasks.lab.probe_set import ProbeSet, finding, passed
from grpo_tasks.lab.probes import CUT_OFF, LISTING, PERFECT, WRONG_ANSWER
from grpo_tasks.rewards.suite import full_score
from grpo_tasks.rewards.totals import solved, stage_weights, total_scores
from schemas.config.rewards import RewardsConfig
from schemas.config.stage import StageConfig
from schemas.results.lab import LabCheck, SignalForecast

_NOTHING = (-math.inf, -1)
"""The best of no probes."""


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
    """The checks order, empty and gaming of one stage, as far as its rows allow; none when a function broke its contract."""
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
