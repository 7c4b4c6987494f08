"""Twenty kills at seeded random points, each followed by the same command; see chaos.py."""

import pytest

from tests.flows.chaos import rampage, undisturbed

pytestmark = [pytest.mark.xdist_group("chaos"), pytest.mark.long, pytest.mark.timeout(3600)]


def test_twenty_kills_do_not_change_the_result_of_a_pipeline(tmp_path, prefect_api):
    wanted, seconds = undisturbed(tmp_path, prefect_api)
    outcome = rampage(tmp_path, prefect_api, kills=20, seed=1, wanted=wanted, seconds=seconds)
    assert not outcome.differences, "\n".join(outcome.differences)
    assert not outcome.left_over
    assert outcome.kills == 20
    assert len(outcome.victims) > 5, outcome.victims
