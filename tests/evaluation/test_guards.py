"""The guards of a promotion: each metric against plain Python, the limits, and the examples of what got worse."""

import re
from itertools import product

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from grpo_tasks.evaluation.guards import check_guard_pattern, compare_guard, sample_values
from schemas.config.evaluation import PromotionConfig, PromotionGuard
from schemas.errors import ConfigError
from schemas.metrics import PROMOTING
from schemas.results.evaluation import EvalReport
from schemas.results.model import ModelRef

TEXTS = ["I cannot help with THAT.", "Sure! Нет", "", "42", "Ich kann nicht helfen", "да и нет, yes"]
LETTER = re.compile(r"[^\W\d_]")


def guard(metric, **settings):
    return PromotionGuard(name="safety", data=[{"path": "rows.jsonl"}], metric=metric, **({"max_drop": 0.1} | settings))


def samples(texts, **columns):
    basic = {"prompt_id": [f"p{index:03}" for index in range(len(texts))], "sample": [0] * len(texts), "completion": texts}
    return pl.DataFrame(basic | columns)


def report(folder, label, table):
    folder.mkdir(exist_ok=True)
    (folder / label).mkdir()
    table.write_parquet(folder / label / "samples.parquet")
    made = {"key": "", "directory": folder / label, "seconds": 0.0, "label": label, "model": ModelRef(path="embedded:base")}
    rest = {"prompts": table.height, "num_samples": 1, "temperature": 1.0, "confidence": 0.95, "metrics": {}, "pass_at_k": {}}
    return EvalReport(**made, **rest)


@pytest.fixture
def compared(tmp_path):
    def compare(which, ours, theirs, alpha=0.05):
        questions = {f"p{index:03}": f"question {index}" for index in range(ours.height)}
        made = report(tmp_path, "merged", ours), report(tmp_path, "champion", theirs)
        return compare_guard(which, *made, against="champion", questions=questions, alpha=alpha)

    return compare


def expected(which, text):
    if which.metric in ("contains", "lacks"):
        found = any(phrase.lower() in text.lower() for phrase in which.phrases)
        found = found or (which.pattern is not None and re.search(which.pattern, text) is not None)
        return float(found if which.metric == "contains" else not found)
    letters = LETTER.findall(text)
    own = [one for one in letters if ("А" <= one <= "я") == (which.script == "Cyrillic")]
    return len(own) / len(letters) if letters else 0.0


@pytest.mark.parametrize(
    "which",
    [
        *(guard(metric, phrases=["cannot help", "НЕТ"]) for metric in ("contains", "lacks")),
        *(guard(metric, pattern="[0-9]+|nicht") for metric in ("contains", "lacks")),
        guard("contains", phrases=["yes"], pattern="Sure"),
        guard("script_share", script="Cyrillic"),
        guard("script_share", script="Latin"),
    ],
    ids=str,
)
def test_a_metric_of_texts_equals_plain_python(which):
    found = sample_values(samples(TEXTS), which)["value"].to_list()
    assert found == pytest.approx([expected(which, text) for text in TEXTS])


@pytest.mark.parametrize(
    ("which", "column"),
    [
        (guard("accuracy"), "correct"),
        (guard("mean_length"), "completion_tokens"),
        (guard("evaluator", evaluator="mine:polite"), "rewards/safety/mean"),
    ],
    ids=str,
)
def test_a_metric_with_a_column_is_its_mean(which, column, compared):
    rng = np.random.default_rng(1)
    ours, theirs = ([bool(one) for one in rng.integers(0, 2, 30)] for _ in range(2))
    found = compared(which, samples(["x"] * 30, **{column: ours}), samples(["x"] * 30, **{column: theirs}))
    assert (found.ours, found.theirs) == pytest.approx((np.mean(ours), np.mean(theirs)))
    assert found.change == pytest.approx(np.mean(ours) - np.mean(theirs))


def test_a_proved_drop_beyond_the_limit_fails_and_shows_the_worst_prompts(compared):
    before, after = ["I cannot help"] * 12, ["I cannot help"] * 4 + ["Sure"] * 8
    found = compared(guard("contains", phrases=["cannot"]), samples(after), samples(before))
    assert not found.passed
    # All sign assignments of the eight prompts that changed.
    assert found.p_value == pytest.approx(np.mean([sum(signs) >= 8 for signs in product([1, -1], repeat=8)]))
    assert len(found.worse) == 3
    assert (found.worse[0].question, found.worse[0].before, found.worse[0].after) == ("question 4", "I cannot help", "Sure")
    assert "guard safety: contains 1 -> 0.3333 against the champion" in str(found)


@pytest.mark.parametrize(("certain", "passed"), [(True, True), (False, False)])
def test_a_drop_that_chance_explains_fails_only_where_the_mean_decides(certain, passed, compared):
    which = guard("contains", phrases=["cannot"], certain=certain)
    found = compared(which, samples(["I cannot"] * 3 + ["Sure"] * 2), samples(["I cannot"] * 5))
    assert found.p_value == 0.25
    assert found.passed is passed


@pytest.mark.parametrize(
    ("settings", "tokens", "passed"),
    [
        ({"max_drop": None, "max_rise": 0.5}, 150, True),
        ({"max_drop": None, "max_rise": 0.5}, 151, False),
        ({"max_drop": None, "max_rise": 0.5}, 1, True),
        ({"max_drop": 0.5}, 50, True),
        ({"max_drop": 0.5}, 49, False),
        ({"max_drop": 0.5, "max_rise": 0.1}, 120, False),
    ],
    ids=str,
)
def test_the_limits_of_a_length_are_shares_of_the_length_before(settings, tokens, passed, compared):
    which = guard("mean_length", **settings)
    found = compared(which, samples(["x"] * 9, completion_tokens=[tokens] * 9), samples(["x"] * 9, completion_tokens=[100] * 9))
    assert found.passed is passed
    assert bool(found.worse) is not passed


def test_the_same_answers_pass_every_guard(compared):
    which = guard("lacks", phrases=["help"], max_drop=0.0, max_rise=0.0, certain=False)
    assert compared(which, samples(TEXTS), samples(TEXTS)).passed


@pytest.mark.parametrize("pattern", ["(a)\\1", "a(?=b)", "("])
def test_a_pattern_that_could_backtrack_is_refused_with_its_guard(pattern):
    with pytest.raises(ConfigError, match=r"safety\.pattern"):
        check_guard_pattern(guard("lacks", pattern=pattern))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metric": "lacks"}, "needs phrases"),
        ({"metric": "lacks", "phrases": [" "]}, "needs phrases|phrases"),
        ({"metric": "accuracy", "phrases": ["x"]}, "takes neither"),
        ({"metric": "evaluator"}, "belong together"),
        ({"metric": "accuracy", "max_drop": None}, "has no limit"),
        ({"metric": "accuracy", "script": "Latin"}, "not a script"),
        ({"metric": PROMOTING[3]}, "cannot measure"),
    ],
    ids=str,
)
def test_a_guard_whose_settings_do_not_fit_is_refused_with_a_fix(settings, words):
    with pytest.raises(ValidationError, match=f"({words}).*fix:"):
        guard(**settings)


def test_two_guards_of_one_name_are_refused():
    with pytest.raises(ValidationError, match="two guards have the name safety"):
        PromotionConfig(guards=[guard("accuracy"), guard("accuracy")])
