"""Plots are drawn from journals and show the journal's values."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.image import imread

from grpo_tasks.stage.journal import Journal
from grpo_tasks.tracking import plots
from schemas.metrics import KL, LEARNING_RATE, LOSS, REWARD, TOKEN_ACCURACY

from .conftest import write_journal


@pytest.fixture
def journals(tmp_path):
    write_journal(tmp_path / "format.jsonl", range(1, 61))
    write_journal(tmp_path / "correctness.jsonl", range(1, 201), shift=-3.0)
    return [("format", tmp_path / "format.jsonl"), ("correctness", tmp_path / "correctness.jsonl")]


def read_steps(journal):
    return Journal(journal, writes=False).steps


def test_series_hold_the_journals_numbers_stage_after_stage(journals):
    steps = read_steps(journals[0][1])
    groups = plots._group(steps)
    assert groups["reward"][0].values == [metrics[REWARD] for metrics in steps.values()]
    assert {series.label for series in groups["rewards"]} == {"format", "own"}
    assert {series.label for series in groups["completion_length"]} == {"mean length", "max length"}
    boundaries, groups = plots._join([(name, read_steps(path)) for name, path in journals])
    assert boundaries == [0, 60, 260]
    assert groups["reward"][0].steps == list(range(1, 261))
    # No line crosses from one stage to the next.
    assert [len(steps) for steps, _ in plots._pieces(groups["reward"][0], boundaries)] == [60, 200]


@pytest.mark.slow
def test_the_overview_is_drawn_and_the_same_journals_give_the_same_bytes(journals, tmp_path):
    first, second = (plots.plot_overview(journals, tmp_path / name / "overview.png") for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert imread(first).shape[1] > 1_200


@pytest.mark.slow
@pytest.mark.parametrize("updates", [[5, 6, 40, 200, 10], [100, 150], [1, 1, 1], [300_000, 20, 300_000]], ids=str)
def test_no_label_of_a_figure_covers_another_one_or_a_curve(tmp_path, monkeypatch, updates):
    figures, names = (
        [],
        ("format", "imitation-of-demonstrations", "arithmetic-with-carry", "correctness", "last-polish-with-length"),
    )
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure) or path)
    stages = list(zip(names, updates, strict=False))
    for name, last in stages:
        write_journal(tmp_path / f"{name}.jsonl", range(max(1, last - 20), last + 1))
    plots.plot_overview([(name, tmp_path / f"{name}.jsonl") for name, _ in stages], tmp_path / "overview.png")
    [figure] = figures
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for axes in figure.axes for text in written(axes) if text.get_text()]
    assert {name for name, _ in stages} <= {text for text, _ in boxes}
    assert [(one, other) for (one, box), (other, its) in combinations(boxes, 2) if overlap(box, its)] == []
    for axes in figure.axes:
        lowest = min(text.get_window_extent().y0 for text in axes.texts)
        assert all(line.get_window_extent().y1 <= lowest for line in axes.lines if len(line.get_xdata()) > 2)


def written(axes):
    """All texts of a panel. Ticks beyond the limits of an axis are not drawn."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)
        yield axis.get_offset_text()
        yield axis.get_label()
    yield from axes.texts
    # The panels' titles stand on the left.
    yield axes._left_title
    yield from axes.get_legend().get_texts() if axes.get_legend() else []


def overlap(one, other):
    return min(one.x1, other.x1) - max(one.x0, other.x0) > 0.5 and min(one.y1, other.y1) - max(one.y0, other.y0) > 0.5


def test_an_empty_or_missing_journal_gives_an_empty_overview(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert plots.plot_stage(tmp_path / "missing.jsonl", tmp_path / "plots") == []
    assert plots.plot_overview([("a", tmp_path / "empty.jsonl")], tmp_path / "overview.png").exists()


def test_the_overview_of_demonstrations_shows_what_they_measure(tmp_path, recwarn):
    journal = Journal(tmp_path / "imitation.jsonl")
    for step in range(1, 121):
        journal.append(step, {LOSS: 3.0 / step, TOKEN_ACCURACY: 1.0 - 1.0 / step, LEARNING_RATE: 1e-3})
    picture = imread(plots.plot_overview([("imitation", tmp_path / "imitation.jsonl")], tmp_path / "overview.png"))
    assert not [str(warning.message) for warning in recwarn if "layout" in str(warning.message)]
    rows, columns = picture.shape[0] // 2, picture.shape[1] // 3
    top = [picture[:rows, at : at + columns, :3] for at in (0, columns, 2 * columns)]
    coloured = [bool((panel.std(axis=-1) > 0.05).any()) for panel in top]
    assert coloured == [False, True, True], "learning rate and loss have curves; lengths were not measured"


@pytest.mark.parametrize("size", [1, 19, 3_000])
def test_smoothing_keeps_the_mean_of_a_constant_and_the_range(size):
    values = np.random.default_rng(size).random(size)
    smooth = plots._smooth(values)
    assert smooth.shape == values.shape
    assert values.min() - 1e-9 <= smooth.min() <= smooth.max() <= values.max() + 1e-9
    np.testing.assert_allclose(plots._smooth(np.full(size, 3.0)), 3.0)
    np.testing.assert_allclose(plots._smooth(values[::-1]), smooth[::-1], err_msg="it shifts no curve in time")


def test_a_single_measurement_is_visible(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in range(1, 21):
        journal.append(step, {REWARD: 1.0} | ({KL: 0.2} if step == 11 else {}))
    drawn = {file.stem: imread(file)[60:-60, 100:-60, :3] for file in plots.plot_stage(tmp_path / "metrics.jsonl", tmp_path)}
    assert set(drawn) == {"reward", "kl"}
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    assert (np.abs(drawn["kl"] - blue).max(-1) < 0.05).sum() > 20
