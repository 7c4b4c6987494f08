"""Compares two past runs: settings that differ, paired differences of the evaluation, curves, completions that disagree.

    PastRun, PastRun --compare_runs--> Comparison --write_comparison--> one HTML page

The runs come from MLflow (tracking/past_runs.py). What this module does not do: test which run is better; the intervals only
describe the difference.
"""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from grpo_tasks.content.conversations import turn_by_turn
from grpo_tasks.evaluation.statistics import mean_interval, prompt_values
from grpo_tasks.kit.files import replacing
from grpo_tasks.reporting.page import picture, render
from grpo_tasks.tracking.past_runs import PastRun
from grpo_tasks.tracking.plots import COLOURS, new_panels, save_figure, style_axes
from schemas.config.evaluation import PromotionConfig
from schemas.metrics import (
    ACCURACY,
    CURVES,
    FORMAT_RATE,
    LENIENT_ACCURACY,
    REWARD,
    TASK_FAMILIES,
    TRUNCATED_RATE,
    column_of,
    describe_figure,
    member,
)
from schemas.results.base import Section

FIGURES = (FORMAT_RATE, ACCURACY, LENIENT_ACCURACY, TRUNCATED_RATE, REWARD)
"""Compared metrics; each is the mean of one column of the sampled completions. The means of the functions that both runs measured
follow, and the figures of each task where both runs have several."""
CONFIDENCE = 0.95
FIRST_COLOUR, SECOND_COLOUR = COLOURS[:2]
_MAX_DISAGREEMENTS = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of both runs, and second minus first with its interval over the common prompts."""

    name: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    share: bool = True
    """Whether it is a share, which is shown in percent."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A prompt that one model answers right and the other wrong, judged by the first sample of each.

    Without ground truth: a prompt for which the two samples earn different rewards.
    """

    prompt_id: str
    question: str
    first: str
    first_right: bool | None
    first_reward: float | None
    second: str
    second_right: bool | None
    second_reward: float | None

    @property
    def second_is_better(self) -> bool:
        """Whether the second model's sample is the right one, or the one with the higher reward."""
        if self.second_right is not None:
            return self.second_right
        return (self.second_reward or 0.0) > (self.first_reward or 0.0)


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

    def section(self, first: str, second: str) -> Section:
        """The figures of the runs, which are called `first` and `second`, with the difference and its interval."""
        rows = []
        for row in self.figures:
            scale, digits, unit = (100, 1, " %") if row.share else (1, 3, "")
            values = [f"{scale * value:.{digits}f}{unit}" for value in (row.first, row.second)]
            change, low, high = (f"{scale * value:+.{digits}f}" for value in (row.difference, row.low, row.high))
            rows.append([row.name, *values, change, f"{low} to {high}"])
        columns = (first, second, "difference", "interval")
        return Section(columns=("figure", *columns), rows=rows, right=columns)


def compare_runs(first: PastRun, second: PastRun) -> Comparison:
    """Compute the comparison. The same runs give the same result: the bootstrap has a fixed seed."""
    names = sorted(first.settings.keys() | second.settings.keys())
    pairs = [(name, first.settings.get(name, "-"), second.settings.get(name, "-")) for name in names]
    left, right = first.samples, second.samples
    common = set(left["prompt_id"]) & set(right["prompt_id"])
    return Comparison(
        first,
        second,
        [pair for pair in pairs if pair[1] != pair[2]],
        len(common),
        _differences(left, right) if common else [],
        _disagreements(first, second),
    )


def _differences(first: pl.DataFrame, second: pl.DataFrame) -> list[Difference]:
    """The figures that both runs measured, over all prompts and then for each task."""
    functions = sorted(name for name in first.columns if PromotionConfig.decides_by(name))
    found = [_difference(name, name, first, second) for name in (*FIGURES, *functions)]
    both_have_tasks = "task" in first.columns and "task" in second.columns
    tasks = sorted({*first["task"], *second["task"]}) if both_have_tasks else []
    for task in tasks if len(tasks) > 1 else []:
        left, right = (samples.filter(pl.col("task") == task) for samples in (first, second))
        found += [_difference(member(family, task), name, left, right) for name, family in TASK_FAMILIES.items()]
    return [one for one in found if one is not None]


def _difference(name: str, of: str, first: pl.DataFrame, second: pl.DataFrame) -> Difference | None:
    """The difference of the metric `of` with its interval over prompts; None where no prompt has both values."""
    if column_of(of) not in first.columns or column_of(of) not in second.columns:
        return None
    both = prompt_values(first, of).join(prompt_values(second, of), on="prompt_id", suffix="_second").drop_nulls()
    if both.is_empty():
        return None
    both = both.sort("prompt_id")
    values, others = both["value"].to_numpy(), both["value_second"].to_numpy()
    found, metric = mean_interval(others - values, confidence=CONFIDENCE), describe_figure(name)
    share = metric is not None and metric.unit == "share"
    return Difference(name, float(values.mean()), float(others.mean()), found.value, found.low, found.high, share)


def _disagreements(first: PastRun, second: PastRun) -> list[Disagreement]:
    """One right and one wrong answer first; then, where there is no ground truth, the largest differences in reward."""
    left, right = (_first_samples(run.samples) for run in (first, second))
    both = left.join(right, on="prompt_id", suffix="_second").sort("prompt_id")
    contrary = both.filter(pl.col("correct") != pl.col("correct_second"))
    change = (pl.col(f"{REWARD}_second") - pl.col(REWARD)).abs()
    unjudged = both.filter(pl.col("correct").is_null() | pl.col("correct_second").is_null()).filter(change > 0)
    found = pl.concat([contrary, unjudged.sort(change, descending=True, maintain_order=True)]).head(_MAX_DISAGREEMENTS)
    questions = first.prompts | second.prompts
    return [Disagreement(prompt_id, questions.get(prompt_id, ""), *rest) for prompt_id, *rest in found.iter_rows()]


def _first_samples(samples: pl.DataFrame) -> pl.DataFrame:
    reward = pl.col(REWARD).cast(pl.Float64) if REWARD in samples.columns else pl.lit(None, pl.Float64)
    right = pl.col("correct").cast(pl.Boolean)
    return turn_by_turn(samples.filter(pl.col("sample") == 0)).select("prompt_id", "completion", right, reward.alias(REWARD))


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
    with replacing(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")
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
