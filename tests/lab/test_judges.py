"""The lab puts a judge on trial: its contract on probes and samples, its opinions on pairs that people judged."""

import json

import pytest

from grpo_tasks.lab.judge_checks import GoldPair, check_judges, padded, read_gold, try_judge
from grpo_tasks.lab.probes import GroupSample
from grpo_tasks.lab.run import run_lab
from schemas.config.rewards import RewardsConfig
from schemas.errors import ConfigError, JudgeUnavailableError
from tests.judging.endpoint import Endpoint

PAIRS = [GoldPair(f"Question {number}?", "good good", "good") for number in range(4)]
LINE = json.dumps({"question": "Why?", "better": "good good", "worse": "good"})


def longer(texts, properties):
    """The opinion of a judge that prefers the longer text."""
    if "points" in properties:
        return {"points": min(4, len(texts["completion"]) // 10)}
    return {"winner": "a" if len(texts["completion a"]) > len(texts["completion b"]) else "b"}


def gold(tmp_path, *lines):
    path = tmp_path / "gold.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("mode", ["absolute", "pairwise"])
def test_a_fair_judge_agrees_and_a_swayed_one_is_found_out(settings, endpoint, mode):
    trial = try_judge(settings(mode=mode, input_price=10.0, output_price=50.0), PAIRS)
    assert (trial.agreement, trial.length_bias, trial.unjudged) == (1.0, 0.0, 0)
    assert trial.order_bias == (None if mode == "absolute" else 0.0)
    assert trial.requests == len(endpoint.requests) >= 12
    assert trial.cost == pytest.approx(trial.requests * 0.002)
    endpoint.opinion = longer
    assert try_judge(settings(mode=mode, temperature=0.5), PAIRS).length_bias == 1.0


def test_a_judge_that_prefers_the_first_or_the_worse_is_found_out(settings, endpoint):
    endpoint.opinion = lambda *_: {"winner": "a"}
    trial = try_judge(settings(mode="pairwise"), PAIRS)
    assert (trial.order_bias, trial.agreement, trial.length_bias) == (1.0, 0.5, 0.0)
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


def test_padding_is_long_and_keeps_the_text():
    assert padded("x").startswith("x ")
    assert len(padded("x" * 1_000)) > 3_000


def test_only_a_line_feed_ends_a_line(tmp_path):
    said = "one\u2028two\x85three"
    lines = [json.dumps({"question": "Why?", "better": said, "worse": "x"}, ensure_ascii=False), LINE]
    (tmp_path / "gold.jsonl").write_bytes("\r\n".join(lines).encode())
    assert [pair.better for pair in read_gold(tmp_path / "gold.jsonl")] == [said, "good good"]


def test_a_file_or_line_that_is_no_pair_is_named(tmp_path):
    for bad in ("no json", "[]", '{"question": "a"}', '{"question": "a", "better": 1, "worse": "b"}', "[" * 100_000):
        with pytest.raises(ConfigError) as caught:
            read_gold(gold(tmp_path, LINE, "", bad))
        assert "gold.jsonl:3" in caught.value.place
    for path in (gold(tmp_path, ""), tmp_path / "nowhere.jsonl"):
        with pytest.raises(ConfigError):
            read_gold(path)


def section(settings, **changes):
    return RewardsConfig(functions={"taste": {"function": "judge", "judge": settings(**changes)}})


def test_the_lab_reports_agreement_biases_and_cost(settings, endpoint, tmp_path):
    endpoint.opinion = longer
    given = {"gold": gold(tmp_path, LINE), "mode": "pairwise", "input_price": 10.0}
    checks, left_out = check_judges(["taste", "format"], section(settings, **given))
    assert {check.check: check.outcome for check in checks} == {
        "agreement": "passed", "order_bias": "passed", "length_bias": "failed", "cost": "passed",
    }  # fmt: skip
    assert "1,000 completions take about 4,000 requests and cost about 4.00" in checks[-1].detail
    assert left_out == []


def test_the_lab_says_what_it_did_not_measure(settings, endpoint, tmp_path, monkeypatch):
    checks, left_out = check_judges(["taste"], section(settings))
    assert checks == []
    assert "judge.gold" in left_out[0]
    monkeypatch.setattr("grpo_tasks.lab.judge_checks.MAX_PAIRS", 2)
    lines = [LINE.replace("Why?", f"Why {number}?") for number in range(3)]
    _, left_out = check_judges(["taste"], section(settings, gold=gold(tmp_path, *lines)))
    assert left_out == ["1 more gold pairs of taste: the judge is asked about the first 2"]
    assert [f"Why {number}?" in str(endpoint.requests) for number in range(3)] == [True, True, False]


def test_a_judge_that_is_away_stops_the_lab_before_any_training(settings, endpoint, tmp_path):
    endpoint.down = True
    with pytest.raises(JudgeUnavailableError):
        check_judges(["taste"], section(settings, gold=gold(tmp_path, LINE)))


@pytest.mark.slow
def test_a_judge_scores_probes_and_samples_in_the_lab(run_config, settings, make_row, endpoint, tmp_path):
    rows = [make_row(line, str(line + 40), f"What is 40 + {line}?") for line in (1, 2, 3)]
    sample = GroupSample(rows[0].prompt_id, ["good", "bad"], [[1], [2]])
    given = {"taste": {"function": "judge", "judge": settings(gold=gold(tmp_path, LINE)).model_dump(mode="json")}}
    config = run_config({"one": ["taste", "correctness"]}, rewards={"functions": given}, lab={"num_rows": 2})

    def outcomes(samples):
        return {check.check: check.outcome for check in run_lab(config, rows, samples).checks if check.function == "taste"}

    found = outcomes([sample])
    assert found["contract"] == found["agreement"] == "passed"
    assert "determinism" not in found, "its verdicts are cached"
    (tmp_path / "cache" / "verdicts.sqlite").unlink()
    endpoint.opinion = lambda *_: {"points": "many"}
    assert outcomes(None)["verdicts"] == "warned"
