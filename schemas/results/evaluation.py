"""What was measured: held-out evaluations, their comparison, and how hard the training prompts are."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from schemas.metrics import ACCURACY, FORMAT_RATE, HEADLINES, REWARD, TASK_FAMILIES, figure_text
from schemas.results.base import Result, Section, StepResult
from schemas.results.data import PromptsUsed
from schemas.results.model import ModelRef

_SHOWN = (ACCURACY, FORMAT_RATE, REWARD)


class Interval(Result):
    """A value with its confidence interval."""

    value: float
    low: float
    high: float

    def text(self, metric: str, *, gap: str = " ") -> str:
        """The value of an evaluation metric with its interval in brackets behind `gap`."""
        low, high = (figure_text(metric, bound).removesuffix(" %") for bound in (self.low, self.high))
        return f"{figure_text(metric, self.value)}{gap}({low} to {high})"


class EvalReport(StepResult):
    """Held-out evaluation of one model. Files: samples.parquet (Samples in schemas/tables.py), report.md."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("samples.parquet",)

    label: str
    """base, merged, champion, or the stage's name."""
    model: ModelRef
    prompts: int
    num_samples: int
    temperature: float
    confidence: float
    metrics: dict[str, Interval]
    """By metric name (EVALUATION in schemas/metrics.py)."""
    pass_at_k: dict[int, Interval]
    """Unbiased pass@k of strictly right answers for k = 1, 2, 4 ... up to num_samples."""
    prompts_used: PromptsUsed | None = None
    """None where sampling could not stop early."""

    def headline(self) -> str:
        """The main figures."""
        shown = [
            f"{name.replace('_', ' ')} {figure_text(name, self.metrics[name].value)}" for name in _SHOWN if name in self.metrics
        ]
        return f"{self.label}: {', '.join(shown)}"

    @property
    def samples(self) -> Path:
        """The table of all completions."""
        return self.directory / "samples.parquet"


def evaluation_section(reports: Sequence[EvalReport], *, first: Sequence[str] = (), merged_as: str = "") -> Section:
    """A row for each model: the headlines that were measured, then the figures of each task, all with their intervals.

    Args:
        first: metrics that come before them (`RunConfig.figures`).
        merged_as: how the last model was saved (`MergeFigures.saved_as`), if it is the one before it merged: the two are one
            policy, and the text says so.
    """
    measured = dict.fromkeys(name for report in reports for name in report.metrics)
    prefixes = tuple(family.removesuffix("*") for family in TASK_FAMILIES.values())
    shown = [*first, *HEADLINES, *(name for name in measured if name.startswith(prefixes))]
    names = [name for name in dict.fromkeys(shown) if name in measured]
    rows = [
        [one.label, *(one.metrics[name].text(name, gap="\n") if name in one.metrics else "" for name in names)] for one in reports
    ]
    base, titles = reports[0], [name.replace("_", " ") for name in names]
    counts = sorted({one.prompts for one in reports})
    count = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    text = (
        f"{count} held-out prompts, {base.num_samples} samples each at temperature {base.temperature:g}; "
        f"{100 * base.confidence:g} % intervals in brackets."
    )
    if ACCURACY in measured:
        text += " Accuracy is strict (format kept and answer equal); lenient accuracy ignores the format."
    for one in reports:
        if one.prompts_used is not None and one.prompts_used.stopped != "all":
            text += f" {one.label}: {one.prompts_used.text()}."
    if merged_as:
        text += (
            f" The rows {reports[-2].label} and {reports[-1].label} are the same policy: with its adapter, and merged in "
            f"{merged_as}. They differ by rounding alone, which can change what is sampled: compare the intervals."
        )
    return Section(text=text, columns=("model", *titles), rows=rows, right=titles, extra=titles)


class PairedTest(Result):
    """Paired test of a model against another one on the same prompts."""

    against: str  # base or champion
    metric: str
    prompts: int
    difference: float
    """Mean over prompts of our metric minus theirs."""
    p_value: float
    """One-sided p-value: probability of such a difference if neither model were better."""
    better: bool
    looks: int = 1
    """The level alpha was divided by it, because sampling could stop at so many numbers of prompts."""


class Worse(Result):
    """A prompt of a guard on which the new model got worse, with one completion of each model."""

    question: str
    before: str
    after: str
    change: float
    """Mean of our samples minus the mean of theirs."""


class GuardCheck(Result):
    """A guard of the promotion: held-out prompts on which the new model must not get worse."""

    name: str
    metric: str
    against: str  # base or champion
    prompts: int
    ours: float
    theirs: float
    change: float
    """Mean over prompts of our metric minus theirs."""
    limit: str
    """In words, for example `a drop of 0.02`."""
    p_value: float
    """One-sided, of a change in the direction that is limited, by the paired test of the promotion."""
    passed: bool
    worse: list[Worse]
    """The prompts that got worst, at most three; empty when the guard passed."""

    def __str__(self) -> str:
        return (
            f"guard {self.name}: {self.metric} {self.theirs:.4g} -> {self.ours:.4g} against the {self.against} over "
            f"{self.prompts} prompts, p = {self.p_value:.2g}, limit {self.limit}"
        )


def guard_sections(guards: Sequence[GuardCheck]) -> list[Section]:
    """A table of all guards, then the examples of those that failed."""
    rows = []
    for one in guards:
        figures = [f"{one.theirs:.4g}", f"{one.ours:.4g}", one.limit, f"{one.p_value:.2g}"]
        rows.append([f"{one.name} against {one.against}", one.metric, *figures, "yes" if one.passed else "no"])
    columns = ("guard", "metric", "before", "after", "limit", "p", "passed")
    sections = [Section(title="Guards", columns=columns, rows=rows, right=("before", "after", "p"))] if guards else []
    for guard in guards:
        for number, example in enumerate(guard.worse):
            texts = {"Question": example.question, "Before": example.before, f"After ({example.change:+.4g})": example.after}
            sections.append(Section(title="" if number else f"Worse: {guard.name} ({guard.metric})", quotes=texts))
    return sections


class Regression(Result):
    """A metric in which a new model may be worse than the previous one only within a limit."""

    metric: str
    against: str  # base, champion, or the last stage
    ours: float
    theirs: float
    limit: float
    """Largest value of ours that passes; the smallest one for format_rate, and for the metric that the merge must not lose."""
    passed: bool
    p_value: float | None = None
    """Of the paired test whether the merge lost something; None for a check with a fixed limit."""

    def __str__(self) -> str:
        if self.p_value is not None:
            return (
                f"the merge lost {self.metric}: {self.ours:.4g} against {self.theirs:.4g} of {self.against} before it, "
                f"p = {self.p_value:.2g}"
            )
        return f"{self.metric} {self.ours:.4g} against {self.theirs:.4g} of the {self.against}, limit {self.limit:.4g}"


BINS = ("never solved", "up to 25 %", "25 to 50 %", "50 to 75 %", "75 to 100 %", "always solved")
CONFIDENCE = 0.95
"""Confidence level of the intervals of pass rates."""


def histogram(rates: Iterable[float]) -> list[int]:
    """How many pass rates fall into each of `BINS`, whose upper bounds belong to them."""
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
    """None where there are none."""
    never_solved: int
    always_solved: int
    histogram: list[int]


class DifficultyReport(StepResult):
    """Pass rates of the training prompts. Files: pass_rates.parquet (PassRates in schemas/tables.py), report.md, and for measured
    rates samples.parquet with every completion."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ("pass_rates.parquet",)

    label: str
    """Stage whose start was measured; start: that of the first stage."""
    origin: Literal["measured", "column"]
    samples: int
    """Completions per prompt; 0 where a column of the data holds the rates."""
    screen: int = 0
    """Completions after which a prompt that none of them solves got no more; 0: there was no screening."""
    success: float
    """Share of the full reward from which a completion counts as solved."""
    stages: list[StageDifficulty]

    def headline(self) -> str:
        """Mean pass rates of the stages."""
        known = [f"{stage.stage} {stage.mean.value:.1%}" for stage in self.stages if stage.mean is not None]
        return f"mean pass rate: {', '.join(known) or 'unknown'}"

    def sections(self) -> list[Section]:
        """How they were measured, and how many prompts have which."""
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
        """The table of pass rates."""
        return self.directory / "pass_rates.parquet"
