"""What happens after an update, decided in one place: continue, stop, fail, or roll back. The trainer acts.

In this order: a fault of the update, guards, the target, the plateau, the last update, the other runs of a sweep, the deadline.
Everything but the last two is a pure function of the journal, so a resumed stage makes the same decisions.

A run of a sweep is pruned by the median rule of Google Vizier (Golovin et al. 2017, section 3.2.2): its best held-out reward so
far is below the median of the others' at the same update. Runs with the same seed are compared, because they see the same prompts
in the same order; all runs only in a sweep with too few combinations.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from grpo_tasks.stage.guards import WINDOW, Firing, Guards
from grpo_tasks.stage.journal import Events, Journal
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import NotFiniteError, PrunedError, TrainingError
from schemas.metrics import describe
from schemas.results.sweep import Curve, Pruning

CURVES = "curves"
"""Subfolder of a run's folder with a curve for each stage."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Train the next update."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The stage is complete."""

    why: Literal["max_steps", "target", "plateau"]


@dataclass(frozen=True, slots=True)
class Fail:
    """The stage stops without a result."""

    error: TrainingError
    save: bool = False
    """The weights are sound: write a checkpoint to resume from."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """Return to earlier weights; the updates keep counting, with new prompts."""

    to: int
    """Update whose checkpoint is wanted, or the newest one before it."""
    why: str


Verdict = Continue | Stop | Fail | RollBack


@dataclass(slots=True)
class Watch:
    """Judges a stage after each update, from the moment it is created."""

    spec: StageSpec
    updates: int
    """Number of updates of the stage."""
    journal: Journal
    events: Events
    guards: Guards
    agree: Callable[[bool], bool] = lambda late: late
    """Returns what the first rank passes: clocks differ, and all ranks have to stop at the same update."""
    _began: float = field(default_factory=time.perf_counter)
    _compared: int = 0
    """The last update whose evaluation was compared with the other runs of a sweep."""

    def decide(self, step: int, fault: NotFiniteError | None = None, *, resumable: bool = True) -> Verdict:
        """The verdict after update `step`, which is in the journal; a stage that is out of time stops only where resumable."""
        return self._trouble(step, fault) or self.ending(step, resumable=resumable)

    def goal(self, step: int) -> Continue | Stop:
        """Whether the stage is complete: its target, a plateau, or its last update is reached."""
        if target_reached(self.spec, self.journal, step):
            return Stop("target")
        best, patience = self.journal.best_step(step), self.spec.stage.early_stopping_patience
        # So many held-out evaluations have brought no improvement.
        if patience is not None and best is not None and sum(best < at <= step for at in self.journal.evaluations) >= patience:
            return Stop("plateau")
        return Stop("max_steps") if step >= self.updates else Continue()

    def ending(self, step: int, *, resumable: bool) -> Continue | Stop | Fail:
        """Whether the stage is complete, lags behind the other runs of its sweep, or is out of time."""
        pruning, limit = self.spec.pruning, self.spec.resources.max_hours
        if pruning is not None and self.journal.writes and step in self.journal.evaluations:
            # The other runs of the sweep see a new held-out evaluation.
            publish_curve(self._curve(pruning), pruning, self.spec.stage.name)
        verdict = self.goal(step)
        if isinstance(verdict, Stop) or not resumable:
            return verdict
        pruned = self._pruned(step)
        if pruned is not None:
            return pruned
        if limit is None or not self.agree(time.perf_counter() - self._began > limit * 3600):
            return verdict
        error = TrainingError(
            f"stopped at update {step} of {self.updates}, after resources.max_hours {limit:g}; a checkpoint is written",
            place=f"stage {self.spec.stage.name}",
            fix="start the same command again: the stage resumes from this checkpoint",
        )
        return Fail(error, save=True)

    def _pruned(self, step: int) -> Fail | None:
        """The end of a stage whose last held-out evaluation lags behind those of the other runs of its sweep."""
        pruning = self.spec.pruning
        evaluated = max((at for at in self.journal.evaluations if at <= step), default=0)
        if pruning is None or pruning.min_siblings is None or evaluated <= self._compared:
            return None
        self._compared, stage = evaluated, self.spec.stage.name
        own, others, fewest = self._curve(pruning), other_curves(pruning, stage), pruning.min_siblings
        lag = find_lag(own, others, evaluated, min_siblings=fewest, same_seed=pruning.same_seed)
        # The files of the other runs may have changed between two ranks that read them.
        if not self.agree(lag is not None):
            return None
        error = PrunedError(
            f"pruned at update {step} of {self.updates}: {lag or 'the other runs of the sweep do better'}",
            place=f"stage {stage}",
            fix="a checkpoint is written: the same config continues from it with grpo run, or with grpo sweep --no-prune",
        )
        return Fail(error, save=True)

    def _curve(self, pruning: Pruning) -> Curve:
        return curve_of(self.journal, pruning, key=self.spec.key, seed=self.spec.seed)

    def _trouble(self, step: int, fault: NotFiniteError | None) -> Fail | RollBack | None:
        firings = self.guards.check(self.journal, step)
        if fault is not None:
            if self.spec.stage.guards.not_finite == "stop":
                return Fail(fault)
            firings.append(Firing("not_finite", "rollback", fault.message))
        for firing in firings:
            self.events.report(step, firing.event, firing.detail)
        failed = fail_of(firings, self.spec.stage.name, step)
        if failed is not None:
            return failed
        why = ", ".join(firing.event for firing in firings if firing.action == "rollback")
        if not why:
            return None
        limit = self.spec.stage.guards.max_rollbacks
        if self.guards.rollbacks == limit:
            error = TrainingError(
                f"{why}, after {limit} roll backs",
                place=f"stage {self.spec.stage.name}, update {step}",
                fix="lower learning_rate; the earlier events of the stage say what happened",
            )
            return Fail(error)
        # A guard judges the median of its window: the trouble may have begun at the window's first update.
        return RollBack(to=step - WINDOW, why=why)


def fail_of(firings: list[Firing], stage: str, step: int) -> Fail | None:
    """The failure of the first firing whose action is stop."""
    for firing in firings:
        if firing.action == "stop":
            error = TrainingError(
                f"{firing.event}: {firing.detail}",
                place=f"stage {stage}, update {step}",
                fix=f"follow the advice above, or set stages.N.guards.{firing.event}: warn",
            )
            return Fail(error)
    return None


def target_reached(spec: StageSpec, journal: Journal, step: int) -> bool:
    """True when the mean of the stage's `early_stop` metric has reached its target."""
    rule = spec.stage.early_stop
    if rule is None or step < rule.min_steps:
        return False
    values = journal.window(rule.metric, last=step, size=rule.window)
    if len(values) < rule.window:
        return False
    mean, metric = sum(values) / len(values), describe(rule.metric)
    return mean <= rule.target if metric is not None and metric.better == "lower" else mean >= rule.target


@dataclass(frozen=True, slots=True)
class Lag:
    """The best held-out reward of a run so far, and the higher median of the others at the same update."""

    ours: float
    median: float
    siblings: int

    def __str__(self) -> str:
        return f"its held-out reward {self.ours:.3f} is below {self.median:.3f}, the median of {self.siblings} other runs"


def find_lag(own: Curve, others: Iterable[Curve], step: int, *, min_siblings: int, same_seed: bool) -> Lag | None:
    """Compare a run with at least `min_siblings` others of its family at an update."""
    # By key: runs that differ in a later stage only share this one, and it counts once.
    known = {curve.key: curve for curve in others if curve.family == own.family and curve.key != own.key}
    comparable = [curve for curve in known.values() if curve.seed == own.seed or not same_seed]
    rivals = [value for curve in comparable if (value := curve.best(step)) is not None]
    ours = own.best(step)
    if ours is None or not rivals or len(rivals) < min_siblings:
        return None
    middle = median(rivals)
    return Lag(ours, middle, len(rivals)) if ours < middle else None


def curve_of(journal: Journal, pruning: Pruning, *, key: str, seed: int) -> Curve:
    """The evaluations in a stage's journal."""
    return Curve(key=key, seed=seed, family=pruning.family, values=journal.evaluations)


def publish_curve(curve: Curve, pruning: Pruning, stage: str) -> None:
    """Show a curve to the other runs."""
    # On some nodes of a cluster the folder of the sweep cannot be seen.
    if not pruning.folder.is_dir():
        return
    (pruning.folder / CURVES).mkdir(exist_ok=True)
    curve.save(pruning.folder / CURVES / f"{stage}.json")


def other_curves(pruning: Pruning, stage: str) -> list[Curve]:
    """The curves of the other runs at this stage."""
    found = sorted(pruning.folder.parent.glob(f"*/{CURVES}/{stage}.json"))
    return [Curve.load(path) for path in found if path.parent.parent.name != pruning.folder.name]
