"""Two runs side by side: settings that differ, paired differences of the evaluation, curves, completions where they disagree."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from grpo_tasks.reporting.page import picture, render
from grpo_tasks.tracking.past_runs import CURVES, PastRun

FIGURES = {
    "format_rate": "strict_format",
    "accuracy": "correct",
    "lenient_accuracy": "lenient_correct",
    "truncated_rate": "truncated",
}
CONFIDENCE = 0.95
RESAMPLES = 4_000
_SHOWN = 20
_SEED = 20_211_031


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of both runs and the second minus the first, with its interval over the common prompts."""

    name: str
    first: float
    second: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A prompt that one model gets right and the other does not (first sample of each)."""

    prompt_id: str
    question: str
    first: str
    first_right: bool
    second: str
    second_right: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is different between two runs."""

    first: PastRun
    second: PastRun
    settings: list[tuple[str, str, str]]
    """Fields that differ: name, value of the first, value of the second."""
    prompts: int
    """Held-out prompts that both were evaluated on."""
    figures: list[Difference]
    disagreements: list[Disagreement]


def compare_runs(first: PastRun, second: PastRun) -> Comparison:
    """Everything that is computed; deterministic."""
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
    sampled = samples.filter(pl.col("sample") >= 0)
    return sampled.group_by("prompt_id").agg(pl.col(column).mean().alias(name) for name, column in FIGURES.items())


def _difference(name: str, both: pl.DataFrame) -> Difference:
    """The mean difference over prompts; interval by bootstrap over prompts (percentile)."""
    first, second = both[name].to_numpy(), both[f"{name}_second"].to_numpy()
    change = second - first
    rng = np.random.default_rng(_SEED)
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
        for prompt_id, *rest in both.sort("prompt_id").head(_SHOWN).iter_rows()
    ]


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """The page, written in one move."""
    curves = draw_curves(comparison, path.with_suffix(".png"))
    page = render("compare.html", comparison=comparison, first=comparison.first, second=comparison.second, curves=picture(curves))
    curves.unlink()
    part = path.with_name(path.name + ".part")
    part.write_text(page, encoding="utf-8")
    part.replace(path)
    return path


def draw_curves(comparison: Comparison, path: Path) -> Path:
    """The curves of both runs over each other: a row a stage, a column a metric."""
    stages = list(dict.fromkeys([*comparison.first.curves, *comparison.second.curves]))
    figure = Figure(figsize=(3.4 * len(CURVES), 2.6 * max(len(stages), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(max(len(stages), 1), len(CURVES), squeeze=False)
    for row, stage in zip(panels, stages, strict=False):
        for axes, metric in zip(row, CURVES, strict=True):
            for run, colour in ((comparison.first, "#0072b2"), (comparison.second, "#d55e00")):
                curve = run.curves.get(stage, {}).get(metric, [])
                axes.plot([step for step, _ in curve], [value for _, value in curve], color=colour, linewidth=1.2)
            axes.set_title(f"{stage}: {metric}", fontsize=9, loc="left")
            axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path
