"""A judge on trial: agreement with gold labels, order and length bias, cost."""

import json

import pytest

from grpo_tasks.judging.trial import GoldPair, padded, read_gold, try_judge
from schemas.errors import ConfigError
from tests.judging.endpoint import Endpoint

PAIRS = [GoldPair(f"Question {number}?", "good good", "good") for number in range(4)]


def long(texts, properties):
    """Prefers the longer text."""
    if "points" in properties:
        return {"points": min(4, len(texts["completion"]) // 10)}
    first, second = len(texts["completion a"]), len(texts["completion b"])
    return {"winner": "a" if first > second else "b"}


@pytest.mark.parametrize("mode", ["absolute", "pairwise"])
def test_a_fair_judge_agrees_and_is_not_swayed(settings, mode):
    trial = try_judge(settings(mode=mode), PAIRS)
    assert (trial.agreement, trial.length_bias, trial.unjudged) == (1.0, 0.0, 0)
    assert trial.order_bias == (None if mode == "absolute" else 0.0)


@pytest.mark.parametrize("mode", ["absolute", "pairwise"])
def test_a_judge_that_likes_length_is_found_out(settings, endpoint, mode):
    endpoint.opinion = long
    assert try_judge(settings(mode=mode), PAIRS).length_bias == 1.0


def test_a_judge_that_prefers_the_first_is_found_out(settings, endpoint):
    endpoint.opinion = lambda *_: {"winner": "a"}
    trial = try_judge(settings(mode="pairwise"), PAIRS)
    assert (trial.order_bias, trial.agreement, trial.length_bias) == (1.0, 0.5, 0.0)


def test_a_judge_that_prefers_the_worse_does_not_agree(settings, endpoint):
    endpoint.opinion = lambda texts, _: {"points": 4 - texts["completion"].count("good")}
    assert try_judge(settings(), PAIRS).agreement == 0.0


@pytest.mark.parametrize("mode", ["absolute", "pairwise"])
def test_a_judge_that_accuses_the_better_does_not_agree(settings, endpoint, mode):
    def accuses(body):
        found = Endpoint.verdict(endpoint, body)
        label = next((one for one in ("a", "b", "") if f'completion{" " if one else ""}{one}] "good good"' in str(body)), None)
        if label is not None:
            found["manipulation"] = label or "yes"
        return found

    endpoint.verdict = accuses
    # Its points are right, and training would not use them.
    assert try_judge(settings(mode=mode), PAIRS).agreement == 0.0


def test_the_cost_is_that_of_its_requests(settings):
    trial = try_judge(settings(input_price=10.0, output_price=50.0), PAIRS)
    assert trial.requests == 12
    assert trial.cost == pytest.approx(12 * 0.002)


def test_pairs_beyond_the_limit_are_counted(settings, monkeypatch):
    monkeypatch.setattr("grpo_tasks.judging.trial.MAX_PAIRS", 3)
    trial = try_judge(settings(), PAIRS)
    assert (trial.pairs, trial.left_out, trial.requests) == (3, 1, 9)


def test_padding_is_long_and_keeps_the_text():
    assert padded("x").startswith("x ")
    assert len(padded("x" * 1_000)) > 3_000


def gold(tmp_path, *lines):
    path = tmp_path / "gold.jsonl"
    path.write_text("\n".join(lines))
    return path


LINE = json.dumps({"question": "Why?", "better": "good good", "worse": "good"})


def test_only_a_line_feed_ends_a_line(tmp_path):
    said = "one\u2028two\x85three"
    lines = [json.dumps({"question": "Why?", "better": said, "worse": "x"}, ensure_ascii=False), LINE]
    path = tmp_path / "gold.jsonl"
    path.write_bytes("\r\n".join(lines).encode())
    assert [pair.better for pair in read_gold(path)] == [said, "good good"]


@pytest.mark.parametrize(
    "bad", ["no json", "[]", '{"question": "a"}', '{"question": "a", "better": 1, "worse": "b"}', "[" * 100_000]
)
def test_a_line_that_is_no_pair_is_named(tmp_path, bad):
    with pytest.raises(ConfigError) as caught:
        read_gold(gold(tmp_path, LINE, "", bad))
    assert "gold.jsonl:3" in caught.value.place


def test_an_empty_or_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError):
        read_gold(gold(tmp_path, ""))
    with pytest.raises(ConfigError):
        read_gold(tmp_path / "nowhere.jsonl")
