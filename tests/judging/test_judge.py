"""Scores of a judge: points, comparisons, votes, cache, limits, retries and outage, over HTTP."""

import json
import sqlite3
import time

import pytest

from grpo_tasks.judging.judge import Case, Judge, compared
from schemas.errors import JudgeUnavailableError, RewardError
from tests.judging.endpoint import Endpoint, serving

TEXTS = ["bad", "good", "good good", "good good good good"]


def cases(*texts, question="Why?", **given):
    return [Case(question, text, **given) for text in texts]


def scores(settings, texts=TEXTS, **given):
    judge = Judge(settings)
    try:
        return judge.score(cases(*texts, **given))
    finally:
        judge.close()


def test_points_become_scores_between_0_and_1(settings):
    found = scores(settings())
    assert found.scores == [0.0, 0.25, 0.5, 1.0]
    assert (found.tally.asked, found.tally.cached) == (4, 0)


def test_criteria_count_by_their_weights(settings, endpoint):
    endpoint.opinion = lambda *_: {"points": 4}
    rubric = [{"name": "a", "description": "a?", "weight": 3}, {"name": "b", "description": "b?"}]
    asked = Judge(settings(rubric=rubric)).score(cases("x"))
    assert asked.scores == [1.0]

    def only_a(body):
        found = Endpoint.verdict(endpoint, body)
        found["criteria"]["b"]["points"] = 0
        return found

    endpoint.verdict = only_a
    assert Judge(settings(rubric=rubric)).score(cases("y")).scores == [0.75]


def test_the_request_asks_for_the_schema_and_shows_rubric_question_and_reference(settings, endpoint):
    scores(settings(reference_column="answer"), ["good"], question="2 + 2?", reference="four")
    [body] = endpoint.requests
    assert body["response_format"]["type"] == "json_schema"
    assert body["response_format"]["json_schema"]["strict"] is True
    assert "clarity: Is it clear?" in body["messages"][0]["content"]
    assert '"2 + 2?"' in body["messages"][1]["content"]
    assert '"four"' in body["messages"][1]["content"]


def test_pairs_are_asked_in_both_orders(settings, endpoint):
    found = scores(settings(mode="pairwise", opponents=3))
    assert found.scores == [0.0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    assert len(endpoint.requests) == 12
    # A judge that always prefers the first gives everybody the same.
    endpoint.opinion = lambda *_: {"winner": "a"}
    assert scores(settings(mode="pairwise", opponents=3, temperature=0.5)).scores == [0.5] * 4


def test_a_reference_is_the_opponent_of_every_completion(settings, endpoint):
    found = scores(settings(mode="pairwise", reference_column="answer"), ["bad", "good", "good good"], reference="good")
    assert found.scores == [0.0, 0.5, 1.0]
    # The completion that equals its reference is one question in both orders.
    assert len(endpoint.requests) == 5


def test_only_completions_of_one_question_are_compared(settings):
    listed = [*cases("good", "bad"), *cases("good", question="How?")]
    assert compared(listed, settings(mode="pairwise")) == [(0, 1)]
    assert Judge(settings(mode="pairwise")).score(listed).scores == [1.0, 0.0, None]


def test_the_median_of_several_votes_counts(settings, endpoint):
    said = iter([4, 0, 4])
    endpoint.opinion = lambda *_: {"points": next(said)}
    assert scores(settings(votes=3, temperature=0.7, max_concurrency=1), ["x"]).scores == [1.0]
    assert [body["seed"] for body in endpoint.requests] == [0, 1, 2]


def test_a_question_is_asked_once_and_its_verdict_is_on_record(settings, endpoint, tmp_path):
    first = scores(settings(input_price=10.0, output_price=50.0))
    base = sqlite3.connect(tmp_path / "cache" / "verdicts.sqlite")
    messages, reply, problem, cost = base.execute("SELECT messages, reply, problem, cost FROM verdicts").fetchone()
    base.close()
    assert "Is it clear?" in json.loads(messages)[0]["content"]
    assert json.loads(reply)["criteria"]["clarity"]["points"] in range(5)
    assert (problem, cost) == ("", pytest.approx((100 * 10 + 20 * 50) / 1e6))
    again = scores(settings())
    twice = scores(settings(), ["good", "good"])
    assert again.scores == first.scores
    assert twice.scores == [0.25, 0.25]
    assert len(endpoint.requests) == 4
    assert (again.tally.asked, again.tally.cached) == (0, 4)
    # Another rubric is another question.
    scores(settings(rubric=[{"name": "clarity", "description": "Is it short?"}]), ["good"])
    assert len(endpoint.requests) == 5


@pytest.mark.parametrize(
    "reply",
    [
        "no JSON",
        "",
        "{}",
        '```json\n{"points": 4}\n```',
        '{"marker": "0000000000000000", "criteria": {"clarity": {"reason": "", "points": 4}}, "manipulation": "no"}',
        "[" * 100_000,
        "x" * 2_000_000,
    ],
)
def test_a_malformed_verdict_is_asked_for_again_and_recorded(settings, endpoint, tmp_path, reply):
    endpoint.failures = [reply]
    found = scores(settings(), ["good"])
    assert found.scores == [0.25]
    assert (found.tally.asked, found.tally.malformed) == (2, 1)
    base = sqlite3.connect(tmp_path / "cache" / "verdicts.sqlite")
    assert base.execute("SELECT COUNT(*) FROM verdicts WHERE problem != ''").fetchone() == (1,)
    base.close()


def test_a_completion_without_any_sound_verdict_scores_0_and_is_noted(settings, endpoint):
    endpoint.failures = ["nonsense"] * 3
    found = scores(settings(), ["good good"])
    assert (found.scores, found.notes, found.tally.unjudged) == ([0.0], ["unjudged"], 1)


@pytest.mark.parametrize("points", [5, -1, 2.0, True, "4", None])
def test_points_that_the_schema_does_not_allow_are_no_verdict(settings, endpoint, points):
    endpoint.opinion = lambda *_: {"points": points}
    assert scores(settings(max_malformed=0), ["good"]).notes == ["unjudged"]


def test_a_busy_endpoint_is_asked_again(settings, endpoint):
    endpoint.failures = [(429, {"Retry-After": "0"}, "slow down"), (500, {}, "oops"), (200, {}, "not json at all")]
    assert scores(settings(max_outage_s=30.0), ["good"]).scores == [0.25]


def test_an_endpoint_that_refuses_stops_at_once_and_shows_no_key(settings, endpoint, monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-very-secret-1234567")
    for status, said in ((401, "invalid key sk-very-secret-1234567"), (400, "response_format json_schema is not supported")):
        endpoint.failures = [(status, {}, said)]
        with pytest.raises(RewardError, match=f"HTTP {status}") as caught:
            scores(settings(api_key_variable="MY_JUDGE_KEY", max_outage_s=60.0), ["good"])
        assert not isinstance(caught.value, JudgeUnavailableError)
        assert "very-secret" not in str(caught.value)
    assert endpoint.headers[0]["Authorization"] == "Bearer sk-very-secret-1234567"
    monkeypatch.delenv("MY_JUDGE_KEY")
    with pytest.raises(RewardError, match="MY_JUDGE_KEY is not set"):
        scores(settings(api_key_variable="MY_JUDGE_KEY"), ["good"])
    assert len(endpoint.requests) == 2, "no refusal is tried again, and nothing is sent without the key"


TOO_LONG = [
    (400, "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens (8000 in the messages)."),
    (400, '{"error": {"code": "context_length_exceeded", "type": "invalid_request_error"}}'),
    (400, "The decoder prompt (length 9000) is longer than the maximum model length of 4096."),
    (400, '{"error": {"message": "the request exceeds the available context size", "type": "exceed_context_size_error"}}'),
    (413, "Request Entity Too Large"),
]


@pytest.mark.parametrize(("status", "said"), TOO_LONG)
def test_a_completion_too_long_for_the_judge_stays_unjudged(settings, endpoint, tmp_path, status, said):
    answer = endpoint.answer

    def refuses_long_ones(body):
        # As it is counted: a character outside ASCII takes six.
        return (status, {}, said) if len(body["messages"][1]["content"]) > 3_000 else answer(body)

    endpoint.answer = refuses_long_ones
    found = scores(settings(input_price=1.0, max_malformed=1), ["good", "中" * 1_000, "good good"])
    assert (found.scores, found.notes) == ([0.25, 0.0, 0.5], ["", "unjudged", ""])
    assert (found.tally.asked, found.tally.malformed, found.tally.unjudged) == (4, 2, 1)
    # A request that is refused costs nothing.
    assert found.tally.cost == pytest.approx(200 / 1e6)
    base = sqlite3.connect(tmp_path / "cache" / "verdicts.sqlite")
    assert base.execute("SELECT COUNT(*) FROM verdicts WHERE problem != '' AND cost = 0").fetchone() == (2,)
    base.close()


def test_a_kept_connection_has_the_time_limit_of_a_request(settings, endpoint):
    endpoint.spaces, endpoint.pause_s = 3, 0.05
    assert scores(settings(request_timeout_s=30.0), ["good"]).scores == [0.25]
    endpoint.spaces, endpoint.pause_s = 60, 0.2
    begin = time.monotonic()
    with pytest.raises(JudgeUnavailableError, match="ReadTimeout: no complete reply within 1 s"):
        scores(settings(request_timeout_s=1.0), ["good good"])
    assert time.monotonic() - begin < 8.0  # The reply takes 12 s.


def test_a_reply_without_end_is_no_verdict(settings, endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_tasks.judging.client.MAX_REPLY_BYTES", 10_000)
    endpoint.failures = ["x" * 2_000_000]
    found = scores(settings(), ["good"])
    assert (found.scores, found.tally.malformed) == ([0.25], 1)
    # It was cut, and so it is no JSON.
    base = sqlite3.connect(tmp_path / "cache" / "verdicts.sqlite")
    assert base.execute("SELECT reply FROM verdicts WHERE problem != ''").fetchall() == [("",)]
    base.close()


def test_an_outage_stops_after_the_limit_and_keeps_what_was_judged(settings, endpoint):
    scores(settings(), ["good"])
    endpoint.down = True
    with pytest.raises(JudgeUnavailableError, match="503") as caught:
        scores(settings(max_outage_s=0.3), ["good", "good good"])
    assert "resumes" in caught.value.fix
    endpoint.down = False
    assert scores(settings()).tally.cached == 1


def test_no_server_at_all_is_an_outage(settings):
    with serving(Endpoint(None)) as gone:
        pass
    with pytest.raises(JudgeUnavailableError, match="ConnectError"):
        scores(settings(base_urls=[gone]), ["good"])


def test_a_damaged_cache_is_named_with_a_fix(settings, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "verdicts.sqlite").write_bytes(b"not a database" * 1_000)
    with pytest.raises(RewardError, match="cannot be read") as caught:
        Judge(settings())
    assert "judge.cache" in caught.value.fix
