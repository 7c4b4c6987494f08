"""Plots are drawn from journals and show the journal's values."""

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
