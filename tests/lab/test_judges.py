"""The lab puts a judge on trial: its contract on probes and samples, its opinions on pairs that people judged."""

import pytest

from grpo_tasks.lab.forecast import GroupSample
from grpo_tasks.lab.judge_checks import check_judges
from grpo_tasks.lab.run import run_lab
from schemas.config.rewards import RewardsConfig
from schemas.errors import JudgeUnavailableError
from tests.judging.test_trial import LINE, gold, long


def section(settings, **changes):
    return RewardsConfig(functions={"taste": {"function": "judge", "judge": settings(**changes)}})


def test_the_lab_reports_agreement_biases_and_cost(settings, endpoint, tmp_path):
    endpoint.opinion = long
    given = {"gold": gold(tmp_path, LINE), "mode": "pairwise", "input_price": 10.0}
    checks, left_out = check_judges(["taste", "format"], section(settings, **given))
    assert {check.check: check.outcome for check in checks} == {
        "agreement": "passed", "order_bias": "passed", "length_bias": "failed", "cost": "passed",
    }  # fmt: skip
    assert "1,000 completions take about 4,000 requests and cost about 4.00" in checks[-1].detail
    assert left_out == []


def test_without_gold_pairs_the_lab_says_what_it_did_not_measure(settings):
    checks, left_out = check_judges(["taste"], section(settings))
    assert checks == []
    assert "judge.gold" in left_out[0]


def test_the_lab_says_how_many_gold_pairs_it_left_out(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_tasks.judging.trial.MAX_PAIRS", 2)
    _, left_out = check_judges(["taste"], section(settings, gold=gold(tmp_path, LINE, LINE, LINE)))
    assert left_out == ["1 more gold pairs of taste: the judge is asked about the first 2"]


def test_a_judge_that_is_away_stops_the_lab_before_any_training(settings, endpoint, tmp_path):
    endpoint.down = True
    with pytest.raises(JudgeUnavailableError):
        check_judges(["taste"], section(settings, gold=gold(tmp_path, LINE)))


@pytest.fixture
def lab(run_config, settings, make_row):
    """The findings about a stage with one judge and the built-in correctness; arguments change the judge."""

    def run(samples=None, **changes):
        given = {"taste": {"function": "judge", "judge": settings(**changes).model_dump(mode="json")}}
        config = run_config({"one": ["taste", "correctness"]}, rewards={"functions": given}, lab={"num_rows": 2})
        return run_lab(config, [make_row(line, str(line + 40), f"What is 40 + {line}?") for line in (1, 2, 3)], samples)

    return run


def outcomes(findings):
    return {check.check: check.outcome for check in findings.checks if check.function == "taste"}


@pytest.mark.slow
def test_a_judge_scores_probes_and_samples_in_the_lab(lab, endpoint, make_row, tmp_path):
    row = make_row(1, "41", "What is 40 + 1?")
    sample = GroupSample(row.prompt_id, ["good", "bad"], [[1], [2]], ["stop", "stop"])
    findings = lab([sample], gold=gold(tmp_path, LINE))
    found = outcomes(findings)
    assert found["contract"] == found["agreement"] == "passed"
    assert "determinism" not in found, "its verdicts are cached"
    assert endpoint.requests


@pytest.mark.slow
def test_a_judge_without_sound_verdicts_is_named_before_any_training(lab, endpoint, tmp_path):
    endpoint.opinion = lambda *_: {"points": "many"}
    assert outcomes(lab(gold=gold(tmp_path, LINE)))["verdicts"] == "warned"
