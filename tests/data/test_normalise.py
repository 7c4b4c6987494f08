"""Ground truth keeps its meaning and loses its dress."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.data.normalise import normalise_answer, normalised

TIDY = {
    "18": "18",
    " 1,234 ": "1234",
    "$1,234.50": "1234.5",
    "-$5": "-5",
    "$-5": "-5",
    "51.0": "51",
    "51.00.": "51",
    "\u22127": "-7",
    "+3": "3",
    "\u00a042\u200b": "42",
    "1\u00a0000\u00a0000": "1000000",
    "2,000,000": "2000000",
    ".50": "0.5",
    ".0": "0",
    "-0": "0",
    "-0.00": "0",
    "100": "100",
    "12 €": "12",
    "50%": "50%",
    "1,050.0%.": "1050%",
    "10.": "10",
    "0\u00a0%": "0%",
    "-\u00a05": "-5",
    "7\u202f€": "7",
    "0.10": "0.1",
}

UNTOUCHED = [
    "A",
    "(B)",
    "007",
    "1,23",
    "1/2",
    "3 + 4 * 5",
    "\u2212x + 3",
    "x.",
    "U.S.",
    "1e3",
    "3,4,5",
    "12 apples",
    "٣",
    "",
    "$",
    ".",
]


@pytest.mark.parametrize(("given_text", "tidy"), TIDY.items())
def test_number_is_tidied(given_text: str, tidy: str) -> None:
    assert normalise_answer(given_text) == tidy


@pytest.mark.parametrize("text", UNTOUCHED)
def test_what_is_no_number_is_left_alone(text: str) -> None:
    assert normalise_answer(text) == text


def test_text_loses_only_blanks_around_it_and_invisible_characters() -> None:
    assert normalise_answer("\ufeff Chloe\u00a0is a\u200b saint.\n") == "Chloe is a saint."


answers = st.one_of(
    st.text(),
    st.text(alphabet="0123456789.,-+$€%\u2212\u00a0\u200b \n\x1c\x85xA", max_size=12),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    st.integers().map(lambda number: f"{number:,}"),
)


@given(st.lists(answers, max_size=20))
def test_function_and_expression_agree(texts: list[str]) -> None:
    column = pl.DataFrame({"answer": texts}, schema={"answer": pl.String}).select(normalised(pl.col("answer")))["answer"]
    assert column.to_list() == [normalise_answer(text) for text in texts]


@given(answers)
def test_tidying_twice_changes_nothing_more(text: str) -> None:
    once = normalise_answer(text)
    assert normalise_answer(once) == once


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=2))
def test_numeric_value_is_kept(number: object) -> None:
    assert float(normalise_answer(str(number))) == float(str(number))


def test_a_megabyte_of_digits_costs_nothing() -> None:
    text = "0." + "0" * 1_000_000 + "1"
    assert normalise_answer(text) == text
