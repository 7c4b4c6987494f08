"""The sum of a stage's rewards on the bench, which is what a group compares.

    order   perfect > empty; no partial completion above the perfect one; partial above empty (else a warning)
    empty   a completion without an answer earns nothing
    gaming  no gamed completion earns as much as the perfect one
    signal  enough groups of the base model's samples differ (the first stage must, later ones should)

A stage that does not look at answers at all (format only) may pay a listing of answers like any answer. A stage that tells none
of the partial completions from the perfect one (length only) cannot tell gamed ones either: ties are a warning there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_tasks.lab.function_checks import ABOVE, Trial
from grpo_tasks.lab.probe_set import Bench, found, passed
from grpo_tasks.lab.probes import LISTING, PERFECT, WRONG_ANSWER
from grpo_tasks.rewards.totals import stage_weights, total_scores
from schemas.config.rewards import RewardsConfig
from schemas.config.stage import StageConfig
from schemas.results import LabCheck, SignalForecast


@dataclass(frozen=True, slots=True)
class _RowTotals:
    """The stage's totals on the probes of one row."""

    first: int
    """Index of the row's first probe."""
    roles: Sequence[str]
    kinds: Sequence[str]
    totals: Sequence[float]

    @property
    def perfect(self) -> float:
        return self.totals[self.kinds.index(PERFECT)]

    def of(self, role: str) -> list[tuple[float, int]]:
        """Totals of the probes of one role, each with its index on the bench."""
        return [
            (total, self.first + at) for at, (total, mine) in enumerate(zip(self.totals, self.roles, strict=True)) if mine == role
        ]

    @property
    def best_empty(self) -> tuple[float, int]:
        return max(self.of("empty"))

    @property
    def judges_answers(self) -> bool:
        return self.totals[self.kinds.index(WRONG_ANSWER)] < self.perfect - ABOVE

    @property
    def blind(self) -> bool:
        return all(abs(total - self.perfect) <= ABOVE for total, index in self.of("partial") if not self._cut_off(index))

    def _cut_off(self, index: int) -> bool:
        return self.kinds[index - self.first] == "cut_off"


def stage_totals(stage: StageConfig, rewards: RewardsConfig, scores: Mapping[str, Sequence[float | None]]) -> NDArray[np.float64]:
    """[N] totals of the stage's functions, with the weights a stage begins with; NaN where none of them applies."""
    columns = [[np.nan if score is None else score for score in scores[name]] for name in stage.rewards]
    return total_scores(np.array(columns, dtype=np.float64).T, stage_weights(stage, rewards))


def try_stage(stage: StageConfig, bench: Bench, trials: Mapping[str, Trial]) -> list[LabCheck]:
    """Order, empty and gaming of one stage; nothing when one of its functions broke its contract."""
    scores = {name: trials[name].scores for name in stage.rewards}
    known = {name: values for name, values in scores.items() if values is not None}
    if len(known) < len(scores):
        return []
    totals = stage_totals(stage, bench.rewards, known)
    rows = list(_rows(bench, totals.tolist()))
    name = f"stage:{stage.name}"
    return [_order(name, bench, rows), _empty(name, bench, rows), _gaming(name, bench, rows)]


def try_signal(stages: Sequence[StageConfig], forecasts: Sequence[SignalForecast], min_signal: float) -> Iterator[LabCheck]:
    """Whether the forecast of each stage is enough; a failure for the first stage only."""
    for one in forecasts:
        name = f"stage:{one.stage}"
        detail = f"{one.share_with_signal:.0%} of {one.groups} groups of the base model differ in reward"
        if one.share_with_signal >= min_signal:
            yield passed(name, "signal", detail)
            continue
        advice = f"{detail}, wanted {min_signal:.0%}: add an incremental reward, raise num_generations or the temperature"
        first = one.stage == stages[0].name
        yield LabCheck(function=name, check="signal", outcome="failed" if first else "warned", detail=advice)


def _rows(bench: Bench, totals: Sequence[float]) -> Iterator[_RowTotals]:
    for first in range(0, len(totals), bench.kinds):
        probes = bench.probes[first : first + bench.kinds]
        roles, kinds = [probe.role for probe in probes], [probe.kind for probe in probes]
        # A row that no function of the stage applies to; they say so for every completion of a row or for none (trial.py).
        if math.isnan(totals[first]):
            continue
        yield _RowTotals(first, roles, kinds, totals[first : first + bench.kinds])


def _order(name: str, bench: Bench, rows: Sequence[_RowTotals]) -> LabCheck:
    for row in rows:
        empty, index = row.best_empty
        if row.perfect <= empty + ABOVE:
            return _example(
                name, "order", f"an empty answer earns {empty:g}, the perfect completion {row.perfect:g}", bench, index
            )
        partial, index = max(row.of("partial"))
        if partial > row.perfect + ABOVE:
            return _example(name, "order", f"earns {partial:g}, the perfect completion only {row.perfect:g}", bench, index)
    return _order_warning(name, bench, rows) or passed(name, "order")


def _order_warning(name: str, bench: Bench, rows: Sequence[_RowTotals]) -> LabCheck | None:
    for row in rows:
        partial, index = max(row.of("partial"))
        if row.blind:
            detail = f"earns {partial:g} like the perfect completion: this stage teaches neither format nor answers"
            return _example(name, "order", detail, bench, index, warn=True)
        if partial <= row.best_empty[0] + ABOVE:
            detail = f"the best partial completion earns {partial:g}, no more than an empty one: only perfection is rewarded"
            return _example(name, "order", detail, bench, index, warn=True)
    return None


def _empty(name: str, bench: Bench, rows: Sequence[_RowTotals]) -> LabCheck:
    total, index = max(row.best_empty for row in rows)
    if total > ABOVE:
        return _example(name, "empty", f"a completion without an answer earns {total:g}", bench, index)
    return passed(name, "empty")


def _gaming(name: str, bench: Bench, rows: Sequence[_RowTotals]) -> LabCheck:
    tie: LabCheck | None = None
    for row in rows:
        for total, index in row.of("gamed"):
            lead = total - row.perfect
            listing = bench.probes[index].kind == LISTING and not row.judges_answers
            if lead < -ABOVE or (listing and lead <= ABOVE):
                continue
            detail = f"earns {total:g}, honest work {row.perfect:g}"
            if lead > ABOVE or not row.blind:
                return _example(name, "gaming", detail, bench, index)
            tie = tie or _example(name, "gaming", detail, bench, index, warn=True)
    return tie or passed(name, "gaming")


def _example(name: str, check: str, detail: str, bench: Bench, index: int, *, warn: bool = False) -> LabCheck:
    probe = bench.probes[index]
    return found(name, check, detail, bench.row(index), probe=probe.kind, text=probe.text, warn=warn)
