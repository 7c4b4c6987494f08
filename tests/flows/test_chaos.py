"""Twelve kills at seeded random points, each followed by the same command; see chaos.py. `make chaos` has 200."""

import pytest

from tests.flows.chaos import SHARES, rampage, undisturbed

pytestmark = [pytest.mark.xdist_group("chaos"), pytest.mark.long, pytest.mark.timeout(3600)]


def test_twelve_kills_do_not_change_the_result_of_a_pipeline(tmp_path, prefect_api, monkeypatch):
    # Fewer kills of one pipeline, so that each of the three ways of working gets its turn.
    monkeypatch.setitem(SHARES, "run", 3)
    wanted, seconds = undisturbed(tmp_path, prefect_api)
    outcome = rampage(tmp_path, prefect_api, kills=12, seed=1, wanted=wanted, seconds=seconds)
    assert not outcome.differences, "\n".join(outcome.differences)
    assert not outcome.left_over
    assert outcome.kills == 12
    assert len(outcome.victims) > 5, outcome.victims
