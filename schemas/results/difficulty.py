"""Results of measuring how hard the training prompts are. Those that a stage then trains on are in model.py."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

from schemas.results.base import Result, Section, StepResult
from schemas.results.evaluation import Interval

BINS = ("never solved", "up to 25 %", "25 to 50 %", "50 to 75 %", "75 to 100 %", "always solved")
"""Headings of a histogram of pass rates; an upper bound belongs to its bin."""

CONFIDENCE = 0.95
"""Confidence level of the intervals of pass rates."""


def histogram(rates: Iterable[float]) -> list[int]:
    """How many pass rates fall into each of `BINS`."""
    counts = [0] * len(BINS)
    for rate in rates:
        counts[0 if rate == 0.0 else len(BINS) - 1 if rate == 1.0 else min(4, math.ceil(rate * 4))] += 1
    return counts


class StageDifficulty(Result):
    """Pass rates of the training prompts by the rewards of one stage."""

    stage: str
    prompts: int
    """Prompts with a known pass rate."""
    mean: Interval | None
    """Mean pass rate over these prompts; None where there are none."""
    never_solved: int
    always_solved: int
    histogram: list[int]
    """Prompts by pass rate, in the bins of BINS."""


class DifficultyReport(StepResult):
    """Pass rates of the training prompts. Files: pass_rates.parquet (PassRates in schemas/tables.py), report.md, and for measured
    rates samples.parquet with every completion."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("pass_rates.parquet",)

    label: str
    """Stage whose start was measured; start for the start of the first stage."""
    origin: Literal["measured", "column"]
    samples: int
    """Completions per prompt; 0 where a column of the data holds the rates."""
    screen: int = 0
    """Completions after which a prompt that none of them solves got no more; 0: there was no screening."""
    success: float
    """Share of the full reward from which a completion counts as solved."""
    stages: list[StageDifficulty]

    def headline(self) -> str:
        """The mean pass rate of each stage."""
        known = [f"{stage.stage} {stage.mean.value:.1%}" for stage in self.stages if stage.mean is not None]
        return f"mean pass rate: {', '.join(known) or 'unknown'}"

    def sections(self) -> list[Section]:
        """How the pass rates were measured, and how many prompts have which."""
        screened = f", {self.screen} where none of the first {self.screen} is solved" if self.screen else ""
        measured = (
            f"{self.samples} completions of each training prompt{screened}. A completion is solved when its reward reaches "
            f"{self.success:.0%} of the full reward. Intervals are Wilson's at {CONFIDENCE:.0%}."
        )
        rows = []
        for one in self.stages:
            mean = "unknown" if one.mean is None else f"{one.mean.value:.1%}"
            rows.append([one.stage, f"{one.prompts:,}", mean, *(f"{count:,}" for count in one.histogram)])
        how = "The pass rates come from a column of the data." if self.origin == "column" else measured
        columns = ("prompts", "mean pass rate", *BINS)
        return [Section(text=how, columns=("rewards of stage", *columns), rows=rows, right=columns)]

    @property
    def pass_rates(self) -> Path:
        """The table of pass rates, one line for each stage and prompt."""
        return self.directory / "pass_rates.parquet"
