"""Ends a run of a sweep early when its held-out reward lags behind that of the other runs: the median rule.

    own best so far  <  median of their best at the same update  ->  pruned, with a checkpoint

Google Vizier's rule (Golovin et al. 2017, section 3.2.2), on the best value so far. Runs with the same seed are compared, because
they see the same prompts in the same order; all runs only in a sweep with too few combinations. The best is never pruned.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from grpo_tasks.stage.journal import Journal
from schemas.metrics import EVAL_REWARD
from schemas.results.sweep import Curve, Pruning

CURVES = "curves"
"""Subfolder of a run's folder with a curve for each stage."""


@dataclass(frozen=True, slots=True)
class Lag:
    """A run that does worse than the others."""

    ours: float
    """Its best held-out reward so far, and the median of the others at the same update."""
    median: float
    siblings: int

    def __str__(self) -> str:
        return f"its held-out reward {self.ours:.3f} is below {self.median:.3f}, the median of {self.siblings} other runs"


def find_lag(own: Curve, others: Iterable[Curve], step: int, *, min_siblings: int, same_seed: bool) -> Lag | None:
    """Compare a run with at least `min_siblings` others of its family at an update; None if it does not lag."""
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
    values = {step: metrics[EVAL_REWARD] for step, metrics in journal.steps.items() if EVAL_REWARD in metrics}
    return Curve(key=key, seed=seed, family=pruning.family, values=values)


def publish_curve(curve: Curve, pruning: Pruning, stage: str) -> None:
    """Show a curve to the other runs. Where the folder of the sweep cannot be seen, as on some nodes of a cluster, do nothing."""
    if not pruning.folder.is_dir():
        return
    path = _curve_file(pruning.folder, stage)
    path.parent.mkdir(exist_ok=True)
    curve.save(path)


def other_curves(pruning: Pruning, stage: str) -> list[Curve]:
    """The curves of the other runs at this stage."""
    folders = [folder for folder in sorted(pruning.folder.parent.glob("*")) if folder.name != pruning.folder.name]
    return [Curve.load(path) for folder in folders if (path := _curve_file(folder, stage)).is_file()]


def _curve_file(folder: Path, stage: str) -> Path:
    return folder / CURVES / f"{stage}.json"
