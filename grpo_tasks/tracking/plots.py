"""Figures of training, drawn from journals: one per plot of schemas/metrics.py, and an overview of all stages.

Every figure of the project uses the panels, colours and file settings of this module. Without pyplot: no window, no global state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from grpo_tasks.stage.journal import Journal
from schemas.metrics import PLOTS, REWARD, TOKEN_ACCURACY, describe

FloatArray = NDArray[np.float64]
Steps = Mapping[int, Mapping[str, float | None]]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The set of Okabe and Ito, which colour-blind readers can tell apart."""
_TITLES = {plot.name: plot.title for plot in PLOTS}
_OVERVIEW = {plot.name: plot.title for plot in PLOTS if plot.overview}
_IMITATION_OVERVIEW = {plot.name: plot.imitation for plot in PLOTS if plot.imitation}
_OVERVIEW_COLUMNS = 3
_NAME_PT, _NAME_ROW, _NAME_ROWS, _NAME_GAP, _AXES_SHARE = 8, 0.08, 7, 0.01, 0.9
"""Names of stages: size, height of a row, most rows, gap; and the share of the axes that the layout leaves."""
_SMOOTHED_SHARE = 20
_MAX_HALF_WINDOW = 25


@dataclass(slots=True)
class Series:
    """One line of a plot."""

    label: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def plot_stage(journal: Path, directory: Path) -> list[Path]:
    """One PNG per plot into `directory`, for every metric the journal has; returns the files."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for plot, series in _group(Journal(journal, writes=False).steps).items():
        figure, [axes] = new_panels(1, 1, size=(7, 4))
        _draw(axes, _TITLES[plot], series, breaks=[])
        axes.set_xlabel("update")
        files.append(save_figure(figure, directory / f"{plot}.png"))
    return files


def plot_overview(journals: Sequence[tuple[str, Path]], path: Path) -> Path:
    """All stages on one time line, as PNG, from (stage name, metrics.jsonl) in the order of training."""
    stages = [(name, Journal(journal, writes=False).steps) for name, journal in journals]
    boundaries, groups = _join(stages)
    measured = {name for _, steps in stages for metrics in steps.values() for name in metrics}
    imitates = REWARD not in measured and TOKEN_ACCURACY in measured
    titles = _IMITATION_OVERVIEW if imitates else _OVERVIEW
    rows = -(-len(titles) // _OVERVIEW_COLUMNS)
    figure, panels = new_panels(rows, _OVERVIEW_COLUMNS, size=(4.0, 3.1))
    for number, ((plot, title), axes) in enumerate(zip(titles.items(), panels, strict=False)):
        _draw(axes, title, groups.get(plot, []), breaks=boundaries)
        for boundary in boundaries[1:-1]:
            axes.axvline(boundary + 0.5, color="0.4", linestyle="--", linewidth=1)
        # Panels share the time line. One without a curve would end at 1, and a name far outside of it leaves no room for axes.
        axes.set_xlim(0, max(boundaries[-1], 1) + 0.5)
        if number > 0 and len(stages) == 1:
            continue
        _name_stages(axes, [name for name, _ in stages], boundaries)
    for axes in panels[-_OVERVIEW_COLUMNS:]:
        axes.set_xlabel("update")
    return save_figure(figure, path)


def _name_stages(axes: Axes, names: Sequence[str], boundaries: Sequence[int]) -> None:
    """Write the name of each stage over its updates, inside of the axes; where they are short, the names are in several rows."""
    figure, rows = axes.get_figure(root=True), [0.0]
    assert figure is not None, "these axes are of a figure"
    renderer, font = FigureCanvasAgg(figure).get_renderer(), FontProperties(size=_NAME_PT)
    # The layout is computed when the figure is drawn; until then axes are wider than they will be.
    width = _AXES_SHARE * axes.get_window_extent().width
    left, right = axes.get_xlim()
    for name, start, end in zip(names, boundaries[:-1], boundaries[1:], strict=True):
        half = renderer.get_text_width_height_descent(name, font, ismath=False)[0] / width / 2
        middle = min(max(((start + end) / 2 - left) / (right - left), half), max(1 - half, half))
        row = next(
            (number for number, taken in enumerate(rows) if taken <= middle - half + _NAME_GAP), min(len(rows), _NAME_ROWS - 1)
        )
        rows[row : row + 1] = [middle + half + 2 * _NAME_GAP]
        at = 0.99 - _NAME_ROW * row
        axes.text(middle, at, name, ha="center", va="top", fontproperties=font, color="0.35", transform=axes.transAxes)
    # Room for them above the curves.
    low, high = axes.get_ylim()
    axes.set_ylim(low, low + (high - low) / (1 - _NAME_ROW * len(rows)))


def new_panels(rows: int, columns: int, *, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of axes, row by row; `size` is the width and height of one panel in inches."""
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def style_axes(axes: Axes, title: str) -> None:
    """The common look of all axes; x is the number of the update."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    # Five numbers of six digits still stand apart.
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG. The same journal gives the same bytes: the file does not name the library's version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return path


def _group(steps: Steps) -> dict[str, list[Series]]:
    """Series by plot; a name that the table of metrics does not know is not drawn."""
    found: dict[str, dict[str, Series]] = {}
    for step, metrics in steps.items():
        for name, value in metrics.items():
            metric = describe(name)
            if metric is None or not metric.plot or value is None or not np.isfinite(value):
                continue
            # rewards/format/mean -> format; completions/max_length -> max length
            head, _, rest = name.partition("/")
            label = rest.rpartition("/")[0] or (rest or head).replace("_", " ")
            series = found.setdefault(metric.plot, {}).setdefault(name, Series(label))
            series.steps.append(step)
            series.values.append(value)
    return {plot: list(members.values()) for plot, members in found.items()}


def _join(stages: Sequence[tuple[str, Steps]]) -> tuple[list[int], dict[str, list[Series]]]:
    """Stages one after another: the update after which each begins, and the series over all of them."""
    joined: dict[int, Mapping[str, float | None]] = {}
    boundaries = [0]
    for _, steps in stages:
        start = boundaries[-1]
        joined |= {start + step: metrics for step, metrics in steps.items()}
        boundaries.append(start + max(steps, default=0))
    return boundaries, _group(joined)


def _draw(axes: Axes, title: str, series: list[Series], *, breaks: list[int]) -> None:
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        for steps, values in _pieces(one, breaks):
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        for steps, values in _pieces(one, breaks):
            # A line with a single point is invisible without a marker.
            axes.plot(steps, _smooth(values), color=colour, linewidth=1.8, marker="o" if len(steps) == 1 else None)
        axes.plot([], [], color=colour, label=one.label)
    style_axes(axes, title)
    if not series:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color="0.5")
    elif len(series) > 1:
        axes.legend(frameon=False, fontsize=8)


def _pieces(series: Series, breaks: list[int]) -> list[tuple[FloatArray, FloatArray]]:
    """The series, cut where a stage ends. Stages use different rewards: a line across would show a jump that did not happen."""
    steps, values = np.array(series.steps, dtype=np.float64), np.array(series.values, dtype=np.float64)
    cuts = np.searchsorted(steps, breaks, side="right") if breaks else np.array([], dtype=np.int64)
    pieces = zip(np.split(steps, cuts), np.split(values, cuts), strict=True)
    return [(at, of) for at, of in pieces if at.size]


def _smooth(values: FloatArray) -> FloatArray:
    """Centred moving mean over about a tenth of the series; at both ends the window is shorter."""
    half = min(len(values) // _SMOOTHED_SHARE, _MAX_HALF_WINDOW)
    return pl.Series(values).rolling_mean(2 * half + 1, min_samples=1, center=True).to_numpy()
