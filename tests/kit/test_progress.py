"""What rooms report reaches who listens, as lines that fit into a terminal."""

from dataclasses import replace

import pytest

from grpo_tasks.kit import progress as progress_module
from grpo_tasks.kit.progress import Count, Progress, duration, listening, report

WHOLE = Progress(
    "sampling",
    done=512,
    total=1024,
    unit="completions",
    figures="340 tokens/s",
    left_s=150.0,
    step="probe_rewards",
    number=3,
    steps=14,
)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test decides."""
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_a_line_says_step_work_rate_and_time_left():
    assert WHOLE.line(200) == "3/14 probe_rewards: sampling 512/1,024 completions, 340 tokens/s, 2 min left"
    assert Progress("loading the model").line() == "loading the model"
    assert Progress("reading a.csv", done=2_000, unit="rows").line() == "reading a.csv 2,000 rows"
    assert [duration(seconds) for seconds in (9.4, 150, 9000)] == ["9 s", "2 min", "2.5 h"]


@pytest.mark.parametrize("label", ["a", "evaluate_model-correctness", "evaluate_model-" + "long" * 30])
def test_a_line_that_is_too_long_keeps_the_time_left_longest(label):
    lines = [replace(WHOLE, step=label).line(width) for width in range(20, 130)]
    assert all(len(line) <= width for line, width in zip(lines, range(20, 130), strict=True))
    words = ("left", "tokens/s", "completions")
    dropped = [next((at for at, line in enumerate(lines) if word in line), len(lines)) for word in words]
    assert dropped == sorted(dropped)


def test_of_several_figures_the_first_ones_stay():
    updates = Progress("update", 1, 100, figures="reward 0.562, std 0.993, kl 0.000, length 26.156", left_s=30.0)
    assert replace(updates, step="train_stage-format", number=5, steps=12).line() == (
        "5/12 train_stage-format: update 1/100, reward 0.562, std 0.993, 30 s left"
    )


def test_rate_and_time_left_follow_what_was_counted(clock):
    heard = []
    with listening(heard.append):
        count = Count("sampling", 10, "completions")
        for _ in range(5):
            clock[0] += 2.0
            count.add(tokens=100)
    assert (heard[0].done, heard[0].left_s, heard[0].figures) == (0, None, ""), "the beginning is heard before any work"
    assert (heard[-1].done, heard[-1].percent, heard[-1].left_s, heard[-1].figures) == (5, 50.0, 10.0, "50 tokens/s")


def test_work_that_is_begun_counts_for_the_time_left(clock):
    heard = []
    with listening(heard.append):
        count = Count("sampling", 4, "completions")
        clock[0] = 3.0
        # All four at once, each at a quarter of its longest length: none has ended.
        count.add(0, begun=1.0)
    assert (heard[-1].done, heard[-1].percent, heard[-1].left_s) == (0, 25.0, 9.0)


def test_the_innermost_listener_hears_and_then_the_outer_one_again():
    outer, inner = [], []
    with listening(outer.append):
        with listening(inner.append):
            report(Progress("within"))
        report(Progress("after"))
    report(Progress("nobody listens"))
    assert ([one.doing for one in outer], [one.doing for one in inner]) == (["after"], ["within"])
