"""Results of a sweep: what its runs tell each other while they train, how each of them ended, and which one is best, if any."""

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
    """The command that trains nothing again and offers the highest run for promotion."""

    def count(self, state: str) -> int:
        """How many runs ended this way."""
        return sum(line.end is not None and line.end.state == state for line in self.lines)

    @property
    def highest(self) -> SweepLine | None:
        """The finished run with the highest deciding figure; of several, the first."""
        ranked = [(found.value, -line.number, line) for line, found in self._decided()]
        return max(ranked, default=(0.0, 0, None))[2]

    def verdicts(self) -> dict[int, str]:
        """By number: `best` for the highest run, or `tie` for it and for those whose intervals reach into its own."""
        if (highest := self.highest) is None or highest.end is None:
            return {}
        low = highest.end.figures[highest.end.metric].low
        level = [line for line, found in self._decided() if found.high >= low]
        others = [line for line in level if line.number != highest.number]
        # Another seed of the same settings is the same choice, unless seeds are all that differs.
        if any(line.settings != highest.settings or not line.settings for line in others):
            return {line.number: "tie" for line in level}
        return {highest.number: "best"}

    @property
    def ties(self) -> bool:
        """Whether no run is the best one."""
        return "tie" in self.verdicts().values()

    def headline(self) -> str:
        """The verdict and how many did not finish: `best: learning_rate 1e-5, accuracy 78.0 %; 3 of 8 pruned`."""
        highest, tied = self.highest, list(self.verdicts().values()).count("tie")
        first = f"{highest.label}, {highest.end.headline()}" if highest is not None and highest.end is not None else ""
        if tied:
            first = f"tie: {tied} runs do not differ beyond their intervals; the highest is {first}"
        elif first:
            first = f"best: {first}"
        counts = [f"{self.count(state)} of {len(self.lines)} {state}" for state in ("pruned", "failed") if self.count(state)]
        return "; ".join([first or "no run finished", *(counts or [f"{len(self.lines)} runs"])])

    def _decided(self) -> list[tuple[SweepLine, Interval]]:
        """The finished runs with their deciding figure."""
        ends = [(line, line.end) for line in self.lines if line.end is not None and line.end.state == "finished"]
        return [(line, end.figures[end.metric]) for line, end in ends]
