"""Compares two past runs: settings that differ, paired differences of the evaluation, curves, completions that disagree.

    PastRun, PastRun --compare_runs--> Comparison --write_comparison--> one HTML page

The runs come from MLflow (tracking/past_runs.py). What this module does not do: test which run is better; the intervals only
describe the difference.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from grpo_tasks.reporting.page import picture, render
from grpo_tasks.tracking.past_runs import PastRun
from grpo_tasks.tracking.plots import COLOURS, new_panels, save_figure, style_axes
from schemas.metrics import ACCURACY, COLUMNS, CURVES, FORMAT_RATE, LENIENT_ACCURACY, TRUNCATED_RATE

FIGURES = (FORMAT_RATE, ACCURACY, LENIENT_ACCURACY, TRUNCATED_RATE)
"""Compared metrics; each is the mean of one column of the sampled completions."""
CONFIDENCE = 0.95
RESAMPLES = 4_000
FIRST_COLOUR, SECOND_COLOUR = COLOURS[:2]
_MAX_DISAGREEMENTS = 20
_SEED = 20_211_031


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of both runs, and second minus first with its interval over the common prompts."""

    name: str
    first: float
    second: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A prompt that one model answers right and the other wrong, judged by the first sample of each."""

    prompt_id: str
    question: str
    first: str
    first_right: bool
    second: str
    second_right: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two runs."""

    first: PastRun
    second: PastRun
    settings: list[tuple[str, str, str]]
    """Fields that differ: name, value of the first, value of the second."""
    prompts: int
    """Number of held-out prompts that both runs were evaluated on."""
    figures: list[Difference]
    disagreements: list[Disagreement]


def compare_runs(first: PastRun, second: PastRun) -> Comparison:
    """Compute the comparison. The same runs give the same result: the bootstrap has a fixed seed."""
    names = sorted(first.settings.keys() | second.settings.keys())
    pairs = [(name, first.settings.get(name, "-"), second.settings.get(name, "-")) for name in names]
    left, right = _by_prompt(first.samples), _by_prompt(second.samples)
    both = left.join(right, on="prompt_id", suffix="_second").sort("prompt_id")
    return Comparison(
        first,
        second,
        [pair for pair in pairs if pair[1] != pair[2]],
        both.height,
        [_difference(name, both) for name in FIGURES] if both.height else [],
        _disagreements(first, second),
    )


def _by_prompt(samples: pl.DataFrame) -> pl.DataFrame:
    """One row per prompt with the mean of each metric; greedy completions (sample -1) do not count."""
    sampled = samples.filter(pl.col("sample") >= 0)
    return sampled.group_by("prompt_id").agg(pl.col(COLUMNS[name]).mean().alias(name) for name in FIGURES)


def _difference(name: str, both: pl.DataFrame) -> Difference:
    """Mean difference over prompts, with a percentile bootstrap interval over prompts."""
    first, second = both[name].to_numpy(), both[f"{name}_second"].to_numpy()
    change = second - first
    rng = np.random.default_rng(_SEED)
    # [resample, prompt] -> mean over prompts -> [resample]
    means = change[rng.integers(0, len(change), (RESAMPLES, len(change)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Difference(name, float(first.mean()), float(second.mean()), float(change.mean()), float(low), float(high))


def _disagreements(first: PastRun, second: PastRun) -> list[Disagreement]:
    columns = ["prompt_id", "completion", "correct"]
    left, right = (run.samples.filter(pl.col("sample") == 0).select(columns) for run in (first, second))
    both = left.join(right, on="prompt_id", suffix="_second").filter(pl.col("correct") != pl.col("correct_second"))
    questions = first.prompts | second.prompts
    return [
        Disagreement(prompt_id, questions.get(prompt_id, ""), *rest)
        for prompt_id, *rest in both.sort("prompt_id").head(_MAX_DISAGREEMENTS).iter_rows()
    ]


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page. The file at `path` is complete or does not exist, because it is renamed into place."""
    curves = draw_curves(comparison, path.with_suffix(".png"))
    page = render(
        "compare.html",
        comparison=comparison,
        first=comparison.first,
        second=comparison.second,
        curves=picture(curves),
        first_colour=FIRST_COLOUR,
        second_colour=SECOND_COLOUR,
    )
    curves.unlink()
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(path)
    return path


def draw_curves(comparison: Comparison, path: Path) -> Path:
    """The curves of both runs in the same axes: one row per stage, one column per metric."""
    stages = list(dict.fromkeys([*comparison.first.curves, *comparison.second.curves]))
    figure, panels = new_panels(max(len(stages), 1), len(CURVES), size=(3.4, 2.6))
    panels_of = [(stage, metric) for stage in stages for metric in CURVES]
    for axes, (stage, metric) in zip(panels, panels_of, strict=False):
        for run, colour in ((comparison.first, FIRST_COLOUR), (comparison.second, SECOND_COLOUR)):
            curve = run.curves.get(stage, {}).get(metric, [])
            axes.plot([step for step, _ in curve], [value for _, value in curve], color=colour, linewidth=1.2)
        style_axes(axes, f"{stage}: {metric}")
    return save_figure(figure, path)
