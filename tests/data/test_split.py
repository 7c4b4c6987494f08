"""Rows are held out by a hash of the row, never by position."""

import polars as pl
import pytest

from grpo_tasks.data.judge import assign_splits, is_held_out

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(300)]


def splits(verdict):
    return dict(verdict.accepted.select("prompt_id", "split").iter_rows())


def test_row_keeps_its_split_when_others_come_go_or_move(write, verdict_on):
    complete = splits(verdict_on({"train": [{"path": write(*ROWS)}]}))
    half = splits(verdict_on({"train": [{"path": write(*reversed(ROWS[::2]))}]}))
    assert half.items() <= complete.items()
    assert len(half) == 150


def test_other_seed_holds_out_other_rows(write, verdict_on):
    data = {"train": [{"path": write(*ROWS)}]}
    assert splits(verdict_on(data, seed=1)) != splits(verdict_on(data, seed=2))
    assert splits(verdict_on(data, seed=1)) == splits(verdict_on(data, seed=1))


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5])
def test_share_held_out_is_the_configured_fraction(fraction):
    ids = pl.Series([f"{number:016x}" for number in range(20_000)])
    share = (assign_splits(ids, fraction=fraction, seed=0) == "eval").mean()
    assert share == pytest.approx(fraction, abs=0.01)


def test_larger_fraction_only_adds_rows():
    ids = [f"{number:016x}" for number in range(2_000)]
    small = {one for one in ids if is_held_out(one, fraction=0.1, seed=3)}
    assert small < {one for one in ids if is_held_out(one, fraction=0.2, seed=3)}
