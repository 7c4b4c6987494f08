"""Ground truths that nothing can equal are counted before anything is trained."""

import polars as pl
import pytest

from grpo_tasks.answers.ground_truths import MAX_DISTINCT, find_unusable_truths
from schemas.errors import DataError


def rows(*answers):
    return pl.DataFrame({"answer": answers, "source": "a.jsonl", "line": range(1, len(answers) + 1)})


@pytest.mark.parametrize(
    ("how", "answers", "count"),
    [
        ("numeric", ["1", "-2.5", "$1,234", "\\boxed{3/4}", "٤٢"], 0),
        ("numeric", ["1", "Paris", "42 apples", "Paris"], 3),
        ("math", ["1", "x^2+1", "\\frac{1}{2}", "Paris is lovely"], 1),
        ("choice", ["A", "(b)", "C) Paris", "Paris"], 1),
        ("exact", ["Paris", "1"], 0),
    ],
)
def test_answers_that_can_never_be_right_are_counted_and_exact_is_named(how, answers, count):
    found = find_unusable_truths(rows(*answers), how)
    assert (found.count, found.of) == (count, len(answers))
    assert ("completion.equality: exact" in found.warning) == (count > 0)
    found.enforce()


@pytest.mark.parametrize("how", ["numeric", "choice"])
def test_a_column_of_text_is_refused_with_row_and_fix(how):
    with pytest.raises(DataError, match=r"none of the 2 answers can ever be right.*'Paris' in a.jsonl:1") as refused:
        find_unusable_truths(rows("Paris", "Rome"), how).enforce()
    assert refused.value.place == f"completion.equality: {how}"
    assert "completion.equality: exact" in refused.value.fix


def test_text_under_mathematical_equality_is_a_warning_because_identical_text_is_right():
    found = find_unusable_truths(rows("Paris", "Rome"), "math")
    found.enforce()
    assert "2 of 2 answers" in found.warning
    assert "identical" in found.warning


def test_a_row_is_usable_when_one_of_its_answers_is():
    table = rows("seven", "Paris", "8").with_columns(answers=pl.Series([["seven", "7"], ["Paris", "Lutetia"], None]))
    found = find_unusable_truths(table, "numeric")
    assert (found.count, found.of) == (1, 3)
    assert "'Paris' in a.jsonl:2" in found.first


def test_a_long_column_is_checked_by_a_sample_of_its_distinct_answers():
    limit = MAX_DISTINCT["math"]
    found = find_unusable_truths(rows(*(f"{n} apples each" for n in range(2 * limit)), *["7"] * 1_000), "math")
    assert (found.count, found.of) == (limit, limit + 1_000)


def test_a_warning_repeats_little_of_a_long_answer():
    assert len(find_unusable_truths(rows(*["x" * 100_000] * 3), "numeric").warning) < 400


@pytest.mark.parametrize(
    ("answers", "pattern"),
    [
        (["The answer is thus $1$ apple.", "So $x = 3$, which gives $12$."], r"'\$([^$]+)\$'"),
        (["2 + 2 = 4\n#### 4", "so 7\n#### 7"], "'#### (.+)'"),
        (["Tom has 3 apples.", "In 2 of 5 cases."], r"'(-?\d[\d,]*(?:\.\d+)?)'"),
    ],
)
def test_a_pattern_is_proposed_only_where_it_makes_answers_comparable(answers, pattern):
    found = find_unusable_truths(rows(*answers), "numeric")
    assert f"set data.answer_pattern: {pattern}" in found.fix
    taken = pl.Series(answers).str.extract_all(pattern.strip("'")).list.last().str.extract(pattern.strip("'"), 1)
    assert find_unusable_truths(rows(*taken), "numeric").count == 0
    assert "answer_pattern" not in find_unusable_truths(rows(*answers), "numeric", extracted=True).fix
    assert "answer_pattern" not in find_unusable_truths(rows("costs $5 or $six", "Paris"), "numeric").fix


def test_objects_are_compared_as_json_by_the_fix():
    found = find_unusable_truths(rows('{"a":1}', '{"b":"x"}'), "numeric")
    assert "completion.equality: json" in found.fix
    assert find_unusable_truths(rows('{"a":1}', '{"b":"x"}'), "json").count == 0
