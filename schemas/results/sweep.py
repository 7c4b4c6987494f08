"""Results of a sweep: what its runs tell each other while they train, how each of them ended, and which one is best."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from schemas.config.run import RunConfig
from schemas.metrics import figure_text
from schemas.results.base import Result
from schemas.results.evaluation import Interval


class Pruning(Result):
    """How a stage that belongs to a sweep compares itself with the other runs."""

    folder: Path
    """Of the run in the sweep. Those of the other runs lie next to it."""
    family: str
    """The same for runs with equal data, rewards and sampling: their held-out rewards mean the same."""
    min_siblings: int | None
    """Fewest other runs to compare with. None: the stage publishes its evaluations, but is never pruned."""
    same_seed: bool
    """Compare with runs of the same seed only; a sweep with too few combinations compares all."""


class Curve(Result):
    """The held-out evaluations of one stage of one run, for the other runs of the sweep."""

    key: str
    """Of the stage. Runs that share a stage have one curve."""
    seed: int
    family: str
    values: dict[int, float]
    """Update -> held-out reward."""

    def best(self, step: int) -> float | None:
        """The highest held-out reward up to an update; None before an evaluation at it, or later."""
        if max(self.values, default=0) < step:
            return None
        return max((value for at, value in self.values.items() if at <= step), default=None)


class VariantSpec(Result):
    """What the process of one run of a sweep is given."""

    number: int  # from 1, in the order of the grid
    label: str
    """The values that are its own, such as `learning_rate 1e-5, seed 42`."""
    key: str
    config: RunConfig
    copies: Path | None = None
    """The user's own modules, as they were when the sweep started."""
    sweep: str
    parent_run_id: str
    pruning: Pruning
    prefect_api: str | None


class VariantEnd(Result):
    """How one run of a sweep ended."""

    key: str
    state: Literal["finished", "pruned", "failed"]
    reason: str = ""
    metric: str = ""
    """The figure that decides about promotion."""
    figures: dict[str, Interval] = Field(default_factory=dict)
    seconds: float
    run_id: str = ""
    tracking_uri: str = ""
    flow_run_id: str = ""

    def headline(self) -> str:
        """The deciding figure, or why there is none to show."""
        if self.state != "finished":
            return f"{self.state}: {self.reason}"
        return f"{self.metric.replace('_', ' ')} {figure_text(self.metric, self.figures[self.metric].value)}"


class SweepLine(Result):
    """One run in the table of a sweep."""

    number: int
    label: str
    settings: dict[str, str]
    """Path of a setting -> its value, as given."""
    seed: int
    end: VariantEnd | None = None


class SweepResult(Result):
    """The table of a sweep."""

    lines: list[SweepLine]
    run_id: str
    experiment_id: str
    tracking_uri: str
    computed: int = 0
    """Runs that this command started."""
    publish: str = ""
    """The command that trains nothing again and offers the best run for promotion."""

    def count(self, state: str) -> int:
        """How many runs ended this way."""
        return sum(line.end is not None and line.end.state == state for line in self.lines)

    @property
    def best(self) -> SweepLine | None:
        """The finished run with the highest deciding figure; of several, the first."""
        finished = [(line, line.end) for line in self.lines if line.end is not None and line.end.state == "finished"]
        ranked = [(end.figures[end.metric].value, -line.number, line) for line, end in finished]
        return max(ranked, default=(0.0, 0, None))[2]

    def headline(self) -> str:
        """The best run and how many did not finish: `best: learning_rate 1e-5, accuracy 78.0 %; 3 of 8 pruned`."""
        best = self.best
        first = f"best: {best.label}, {best.end.headline()}" if best is not None and best.end is not None else "no run finished"
        counts = [f"{self.count(state)} of {len(self.lines)} {state}" for state in ("pruned", "failed") if self.count(state)]
        return "; ".join([first, *(counts or [f"{len(self.lines)} runs"])])
