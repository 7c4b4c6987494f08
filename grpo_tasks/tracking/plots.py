"""Pictures of training, from journals alone: one figure per plot title of schemas/metrics.py, and one overview of all stages.

    journal -> series grouped by Metric.plot -> TITLE.png          journals of all stages -> overview.png, stages side by side

Drawn without pyplot, so no window, no global state. What it does not do: say whether training went well. Knows no mlflow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from grpo_tasks.tracking.lines import JournalLine, read_journal
from schemas.metrics import describe

FloatArray = NDArray[np.float64]

# The colour-blind safe set of Okabe and Ito.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_TITLES = {
    "reward": "Reward",
    "reward_std": "Reward std within groups",
    "rewards": "Each reward function",
    "reward_weights": "Reward weights",
    "kl": "KL from the reference",
    "completion_length": "Completion length",
    "truncated": "Truncated completions",
    "dead_groups": "Dead groups",
    "learning_rate": "Learning rate",
    "tokens_per_s": "Tokens per second",
    "loss": "Loss (may rise while the model gets better)",
    "entropy": "Entropy",
    "grad_norm": "Gradient norm",
}
_OVERVIEW = ("reward", "rewards", "reward_std", "kl", "completion_length", "dead_groups")
_SMOOTH_OVER = 20


@dataclass(slots=True)
class Series:
    """One line of a plot."""

    label: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def plot_stage(journal: Path, directory: Path) -> list[Path]:
    """One PNG per plot title into `directory`, for whatever the journal measured; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = read_journal(journal)
    return [_draw_title(title, series, directory) for title, series in _group(lines).items()]


def plot_overview(journals: Sequence[tuple[str, Path]], path: Path) -> Path:
    """All stages on one time line, as PNG.

    Args:
        journals: (stage name, metrics.jsonl) in the order of training.
        path: where the picture goes.
    """
    stages = [(name, read_journal(journal)) for name, journal in journals]
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    boundaries, groups = _join(stages)
    for number, (title, axes) in enumerate(zip(_OVERVIEW, figure.subplots(2, 3).flat, strict=True)):
        _draw(axes, title, groups.get(title, []), breaks=boundaries)
        _mark_stages(axes, [name for name, _ in stages], boundaries, named=number == 0 or len(stages) > 1)
    for axes in figure.axes[3:]:
        axes.set_xlabel("update")
    return _save(figure, path)


def _group(lines: Sequence[JournalLine]) -> dict[str, list[Series]]:
    """Series by plot title; a journal name the table does not know is not drawn."""
    found: dict[str, dict[str, Series]] = {}
    for line in lines:
        for name, value in line.metrics.items():
            metric = describe(name)
            if metric is None or not metric.plot or not np.isfinite(value):
                continue
            series = found.setdefault(metric.plot, {}).setdefault(name, Series(_label(name)))
            series.steps.append(line.step)
            series.values.append(value)
    return {title: list(members.values()) for title, members in found.items()}


def _label(name: str) -> str:
    """rewards/format/mean -> format; completions/max_length -> max length."""
    head, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if head == "rewards" else (rest or head).replace("_", " ")


def _join(stages: Sequence[tuple[str, list[JournalLine]]]) -> tuple[list[int], dict[str, list[Series]]]:
    """Stages put end to end: the update each begins after, and the series over all of them."""
    joined: list[JournalLine] = []
    boundaries = [0]
    for _, lines in stages:
        start = boundaries[-1]
        joined += [JournalLine(start + line.step, line.timestamp_ms, line.metrics) for line in lines]
        boundaries.append(start + max((line.step for line in lines), default=0))
    return boundaries, _group(joined)


def _draw_title(title: str, series: list[Series], directory: Path) -> Path:
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw(axes, title, series, breaks=[])
    axes.set_xlabel("update")
    return _save(figure, directory / f"{title}.png")


def _draw(axes: Axes, title: str, series: list[Series], *, breaks: list[int]) -> None:
    for number, one in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        for steps, values in _pieces(one, breaks):
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        for steps, values in _pieces(one, breaks):
            # A line of one point would not be seen.
            axes.plot(steps, _smooth(values), color=colour, linewidth=1.8, marker="o" if len(steps) == 1 else None)
        axes.plot([], [], color=colour, label=one.label)
    axes.set_title(_TITLES.get(title, title), loc="left", fontsize=10, fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if not series:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color="0.5")
    elif len(series) > 1:
        axes.legend(frameon=False, fontsize=8)


def _pieces(series: Series, breaks: list[int]) -> list[tuple[FloatArray, FloatArray]]:
    """The series cut where a stage ends: stages earn different rewards, a line across would tell a jump that was none."""
    steps, values = np.array(series.steps, dtype=np.float64), np.array(series.values, dtype=np.float64)
    cuts = np.searchsorted(steps, breaks, side="right") if breaks else np.array([], dtype=np.int64)
    pieces = zip(np.split(steps, cuts), np.split(values, cuts), strict=True)
    return [(at, of) for at, of in pieces if at.size]


def _smooth(values: FloatArray) -> FloatArray:
    """Centred moving mean over about a twentieth of the series, the window cut at both ends."""
    half = min(len(values) // _SMOOTH_OVER, 25)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    smooth: FloatArray = (sums[high] - sums[low]) / (high - low)
    return smooth


def _mark_stages(axes: Axes, names: Sequence[str], boundaries: list[int], *, named: bool) -> None:
    for boundary in boundaries[1:-1]:
        axes.axvline(boundary + 0.5, color="0.4", linestyle="--", linewidth=1)
    if not named:
        return
    axes.margins(y=0.12)
    for name, start, end in zip(names, boundaries[:-1], boundaries[1:], strict=True):
        middle = (start + end) / 2
        axes.text(middle, 0.99, name, ha="center", va="top", fontsize=8, color="0.35", transform=axes.get_xaxis_transform())


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the library's version in it, the same journal gives the same bytes everywhere.
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path
