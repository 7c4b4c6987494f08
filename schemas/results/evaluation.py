"""Results of held-out evaluations and of their comparison."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from schemas.metrics import ACCURACY, FORMAT_RATE, REWARD, figure_text
from schemas.results.base import Result, Section, StepResult
from schemas.results.model import ModelRef

_SHOWN = (ACCURACY, FORMAT_RATE, REWARD)


class Interval(Result):
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


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

    def headline(self) -> str:
        """The main figures that were measured."""
        shown = [
            f"{name.replace('_', ' ')} {figure_text(name, self.metrics[name].value)}" for name in _SHOWN if name in self.metrics
        ]
        return f"{self.label}: {', '.join(shown)}"

    @property
    def samples(self) -> Path:
        """The table of all completions."""
        return self.directory / "samples.parquet"


class PairedTest(Result):
    """Paired test of a model against another one on the same prompts."""

    against: str
    """base or champion."""
    metric: str
    prompts: int
    difference: float
    """Mean over prompts of our metric minus theirs."""
    p_value: float
    """One-sided p-value: probability of such a difference if neither model were better."""
    better: bool


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
    against: str
    """base or champion."""
    prompts: int
    ours: float
    theirs: float
    change: float
    """Mean over prompts of our metric minus theirs."""
    limit: str
    """The limits in words, for example `a drop of 0.02`."""
    p_value: float
    """One-sided p-value of a change in the direction that is limited, by the paired test of the promotion."""
    passed: bool
    worse: list[Worse]
    """The prompts that got worst, at most three; empty when the guard passed."""

    def __str__(self) -> str:
        """The guard in one line."""
        return (
            f"guard {self.name}: {self.metric} {self.theirs:.4g} -> {self.ours:.4g} against the {self.against} over "
            f"{self.prompts} prompts, p = {self.p_value:.2g}, limit {self.limit}"
        )


def guard_sections(guards: Sequence[GuardCheck]) -> list[Section]:
    """A table of all guards, then the examples of those that failed; nothing when there are no guards."""
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
    against: str
    """base, champion, or the last stage."""
    ours: float
    theirs: float
    limit: float
    """Largest value of ours that passes; the smallest one for format_rate, and for the metric that the merge must not lose."""
    passed: bool
    p_value: float | None = None
    """Of the paired test whether the merge lost something; None for a check with a fixed limit."""

    def __str__(self) -> str:
        """The check in one line."""
        if self.p_value is not None:
            return (
                f"the merge lost {self.metric}: {self.ours:.4g} against {self.theirs:.4g} of {self.against} before it, "
                f"p = {self.p_value:.2g}"
            )
        return f"{self.metric} {self.ours:.4g} against {self.theirs:.4g} of the {self.against}, limit {self.limit:.4g}"
