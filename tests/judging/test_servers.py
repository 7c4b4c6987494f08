"""A judge behind several addresses: they share the work, and one that fails is left out. More of sharing is in tests/kit."""

import pytest

from grpo_tasks.judging.judge import Case, Judge
from grpo_tasks.kit import share
from schemas.errors import JudgeUnavailableError
from tests.judging.endpoint import Endpoint, fair, serving


@pytest.fixture
def two(endpoint, address, settings):
    """Two endpoints, and the settings of a judge behind both."""
    other = Endpoint(fair)
    with serving(other) as url:
        yield endpoint, other, lambda **changes: settings(**{"base_urls": [address, url], "max_concurrency": 1} | changes)


def judged(settings, count):
    judge = Judge(settings)
    try:
        found = judge.score([Case("Why?", f"{number} good") for number in range(count)])
    finally:
        judge.close()
    assert found.scores == [0.25] * count
    return found


def test_both_are_asked_and_a_slow_one_gets_less(two):
    slow, fast, settings = two
    slow.delay_s = 0.5
    judged(settings(max_concurrency=2), 10)
    assert len(fast.requests) > len(slow.requests) > 0
    assert len(fast.requests) + len(slow.requests) == 10


@pytest.mark.parametrize("how", ["busy", "away"])
def test_one_that_fails_is_left_out_while_the_other_answers(two, how, monkeypatch):
    monkeypatch.setattr(share, "FIRST_COOLDOWN_S", 60.0)
    one, other, settings = two
    changes = {}
    if how == "away":
        with serving(Endpoint(None)) as gone:
            pass
        changes = {"base_urls": [gone, settings().base_urls[1]]}
    one.down = True
    # Nobody waits: an outage of no length would stop the run.
    judged(settings(max_outage_s=0.0, **changes), 8)
    assert len(one.requests) == (1 if how == "busy" else 0)
    assert len(other.requests) == 8


def test_an_outage_of_all_names_all(two):
    one, other, settings = two
    one.down = other.down = True
    with pytest.raises(JudgeUnavailableError, match="503") as caught:
        judged(settings(max_outage_s=0.3), 1)
    assert all(url in caught.value.place for url in settings().base_urls)
    assert len(one.requests) == len(other.requests) >= 1
