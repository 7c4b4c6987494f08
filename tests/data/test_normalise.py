"""From raw rows to prompt, normalised ground truth and prompt_id."""

from hashlib import sha256
from random import Random

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.data.normalise import check_patterns, normalise_column, prompt_id_column
from grpo_tasks.data.sources import ROWS, load_sources
from grpo_tasks.data.table import prompt_id
from grpo_tasks.data.validation import Origin, validate_rows
from schemas.config.data import DataConfig, DataSource
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.tables import MESSAGES

NORMALISED = {
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
    "10.": "10",
    "0.10": "0.1",
    "1,050.0%.": "1050%",
    "0\u00a0%": "0%",
    "-\u00a05": "-5",
    "7\u202f€": "7",
}
UNCHANGED = [
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


def normalised(text):
    return pl.DataFrame({"answer": [text]}).select(normalise_column(pl.col("answer"))).item()


@pytest.mark.parametrize(("text", "expected"), [*NORMALISED.items(), *zip(UNCHANGED, UNCHANGED, strict=True)])
def test_a_number_is_normalised_and_other_text_is_unchanged(text, expected):
    assert normalised(text) == expected


def test_text_loses_only_surrounding_whitespace_and_invisible_characters():
    assert normalised("\ufeff Chloe\u00a0is a\u200b saint.\n") == "Chloe is a saint."


answers = st.one_of(
    st.text(),
    st.text(alphabet="0123456789.,-+$€%\u2212\u00a0\u200b \n\x1c\x85xA", max_size=12),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    st.integers().map(lambda number: f"{number:,}"),
)


@given(answers)
def test_normalising_twice_changes_nothing(text):
    once = normalised(text)
    assert normalised(once) == once


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=2))
def test_numeric_value_is_kept(number):
    assert float(normalised(str(number))) == float(str(number))


def test_a_megabyte_of_digits_is_left_unchanged():
    text = "0." + "0" * 1_000_000 + "1"
    assert normalised(text) == text


several = st.none() | st.lists(st.text(min_size=1), min_size=2, max_size=3)
messages = st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}), min_size=1, max_size=3)


@given(st.lists(st.tuples(messages, st.none() | st.text(), several, st.sampled_from(["", "math"])), max_size=5), st.booleans())
def test_prompt_id_of_a_column_is_the_prompt_id_of_each_row(rows, needed):
    schema = {"prompt": MESSAGES, "answer": pl.String, "answers": pl.List(pl.String), "task": pl.String}
    table = pl.DataFrame(rows, schema=schema, orient="row").with_columns(needs_answer=pl.lit(needed))
    expected = [
        None if answer is None and needed else prompt_id(chat, answer, answers=answers, task=task)
        for chat, answer, answers, task in rows
    ]
    assert prompt_id_column(table).to_list() == expected


def test_prompt_id_has_not_changed():
    # If it changes, every row may change its split, and recorded runs no longer match their rows.
    chat = [{"role": "user", "content": "What is 15 + 27?"}]
    assert prompt_id(chat, "42") == "eab2802808b2e297"
    without = b'{"messages":[{"role":"user","content":"What is 15 + 27?"}],"answer":null}'
    assert prompt_id(chat, None) == sha256(without).hexdigest()[:16]
    assert prompt_id([{"content": "q", "role": "user"}], "1") == prompt_id([{"role": "user", "content": "q"}], "1")


@pytest.mark.parametrize("pattern", ["####", "(", "(?=x)(y)", r"(a)\1"])
def test_pattern_without_a_group_or_beyond_linear_time_is_refused(pattern):
    with pytest.raises(ConfigError, match="pattern") as caught:
        check_patterns(DataConfig(train=[DataSource(path="rows.jsonl")], answer_pattern=pattern))
    assert "####" in caught.value.fix


@pytest.mark.parametrize(
    ("pattern", "answer", "truth"),
    [
        ("#### (.+)", "so <<1+1=2>>2\n#### 1,234", "1234"),
        ("#### (.+)", "#### 1\n#### 2\r\n", "2"),
        (r"(\d+)", "12 and 345", "345"),
        (r"####\s*([-−]?\d+)", "####\n−7", "-7"),
        (r"\\boxed\{([^}]*)\}", r"first \boxed{1}, then \boxed{x + 1}.", "x + 1"),
        (r"(?m)^(\d+) (?:apples|pears)$", "3 apples\n4 pears", "4"),
    ],
)
def test_last_match_of_the_pattern_is_the_ground_truth(judged, pattern, answer, truth):
    verdict = judged({"question": "q", "answer": answer}, answer_pattern=pattern)
    assert verdict.accepted["answer"].to_list() == [truth]


def test_system_prompt_is_added_to_every_chat_without_one(judged):
    own = {"role": "system", "content": "own"}
    rows = [
        {"question": "bare", "answer": "1"},
        {"prompt": [{"role": "user", "content": "chat"}], "answer": "1"},
        {"prompt": [own, {"role": "user", "content": "led"}], "answer": "1"},
    ]
    verdict = judged(*rows, system_prompt="ours")
    ours = {"role": "system", "content": "ours"}
    asked = [{"role": "user", "content": content} for content in ("bare", "chat", "led")]
    assert verdict.accepted["prompt"].to_list() == [[ours, asked[0]], [ours, asked[1]], [own, asked[2]]]


@pytest.mark.parametrize("dress", ["{}", "{} €", "€ {}", "{} %"])
def test_decimal_commas_are_read_as_the_numbers_they_are(verdict_on, tmp_path, dress):
    draw = Random(dress)
    values = [draw.randrange(-(10 ** draw.randrange(3, 12)), 10**9) / 100 for _ in range(300)]
    # Python's own format with the marks exchanged is how Germans write them.
    written = [f"{value:,.2f}".translate(str.maketrans(",.", ".,")) for value in values]
    path = tmp_path / "rows.csv"
    lines = [f"Frage {n};{dress.format(text)}" for n, text in enumerate(written)]
    path.write_text("\n".join(["question;answer", *lines]), encoding="utf-8")
    verdict = verdict_on({"train": [{"path": str(path)}]})
    found = [float(answer.removesuffix("%")) for answer in verdict.accepted.sort("line")["answer"]]
    assert found == values
    plain = "\n".join(["x", *(text.replace(".", "") for text in written)])
    assert found == pl.read_csv(plain.encode(), separator=";", decimal_comma=True)["x"].to_list()
    assert [one.used for one in verdict.commas] == [True]


NUMBERS = {
    "decimal points": (["1,234.5", "0.25", "7"], ["1234.5", "0.25", "7"]),
    "thousands": (["1,500", "12", "2,000,000"], ["1500", "12", "2000000"]),
    "thousands, once two numbers": (["1,500", "2,000", "2,5"], ["1500", "2000", "2,5"]),
    "both marks": (["$1,250.00", "2,5"], ["1250", "2,5"]),
    "lists of numbers": (["1,2", "3,4,5", "6, 7"], ["1,2", "3,4,5", "6, 7"]),
    "commas and whole numbers": (["2,5", "12", "1.500"], ["2.5", "12", "1500"]),
    "units": (["1,5 kg", "x = 3", "text, with 3,5"], ["1.5 kg", "x = 3", "text, with 3,5"]),
    "several answers": ([["0,5", "1/2"], "0,75"], ["0.5", "0.75"]),
    "inside a text": (["so #### 2,5", "so #### 1.000,5"], ["2.5", "1000.5"]),
}


@pytest.mark.parametrize(("given", "expected"), NUMBERS.values(), ids=NUMBERS)
def test_commas_are_decimal_where_nothing_in_the_file_speaks_against_it(judged, given, expected):
    rows = [{"question": f"q{n}", "answer": answer} for n, answer in enumerate(given)]
    pattern = {"answer_pattern": "#### (.+)"} if "####" in given[0] else {}
    assert judged(*rows, **pattern).accepted.sort("line")["answer"].to_list() == expected


def test_the_number_format_can_be_set_and_what_was_found_is_said(write, judged, tmp_path):
    rows = [{"question": f"q{n}", "answer": answer} for n, answer in enumerate(["1.500", "2,5", "12.25"])]
    assert judged(*rows, number_format="comma").accepted.sort("line")["answer"].to_list()[:2] == ["1500", "2.5"]
    assert judged(*rows[:2], number_format="point").accepted.sort("line")["answer"].to_list() == ["1.5", "2,5"]
    config = RunConfig.model_validate(
        {"data": {"train": [{"path": write(*rows[:2])}]}, "stages": [{"name": "s", "rewards": ["format"]}]}
    )
    said = []
    origin = Origin("k", tmp_path, 0.0, load_sources(config.data, directory=tmp_path))
    validate_rows(tmp_path / ROWS, config, origin, warn=said.append)
    assert any(
        "rows.jsonl: answers with a decimal comma (1, first '2,5') are read as numbers with a point" in one for one in said
    )
    assert "decimal comma" in (tmp_path / "report.md").read_text()
