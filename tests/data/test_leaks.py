"""Held-out questions in the training data: found in every disguise, and in nothing that is another question."""

import unicodedata
from dataclasses import replace

import polars as pl
import pytest

from grpo_tasks.answers.extraction import is_blank
from grpo_tasks.data import leaks
from grpo_tasks.data.leaks import near_duplicates, normalise_question
from grpo_tasks.data.normalise import SHOWN
from grpo_tasks.data.validation import Origin, report_data

QUESTION = "Tom has 1,500 apples and café owner Ann has 25. How many apples do they have?"
DISGUISES = {
    "case": QUESTION.upper(),
    "spaces": QUESTION.replace(" ", "\u3000\u00a0 \t\u2028"),
    "invisible characters": "\ufeff\u202e"
    + QUESTION.replace("a", "a\u200b\u00ad\u034f").replace(" ", "\ufe0f\u200e ")
    + "\U000e0041",
    "blank letters": QUESTION.replace(" ", "\u3164"),
    "decomposed": unicodedata.normalize("NFD", QUESTION),
    "no accent": QUESTION.replace("é", "e"),
    "full width": QUESTION.replace("1,500", "１，５００").replace("Tom", "Ｔｏｍ"),
    "digits of another script": QUESTION.replace("25", "٢٥"),
    "letters of another script": QUESTION.replace("o", "о").replace("a", "а"),
    "a number without comma": QUESTION.replace("1,500", "1500"),
    "a number with a thin space": QUESTION.replace("1,500", "1\u2009500"),
    "a number in LaTeX": QUESTION.replace("1,500", "$1{,}500$").replace("25", r"\$25"),
    "a number with decimals": QUESTION.replace("25", "25.00").replace("1,500", "01500.0"),
    "other punctuation": QUESTION.replace("?", "!?").replace("Ann", "“Ann”,"),
    "no punctuation": QUESTION.replace("?", "").replace(".", ""),
    "brackets": QUESTION.replace("Ann", "(Ann)").replace("apples", "[apples]"),
    "hyphen": QUESTION.replace("café owner", "café-owner"),
    "emphasis": QUESTION.replace("Tom", "**Tom**").replace("Ann", "*Ann*").replace("apples", "__apples__"),
    "markup": f"<p>{QUESTION.replace('Tom', '<b>Tom</b>').replace(' ', '&nbsp;')}</p>",
}
DIFFERENT = [
    ("What is 3 - 4?", "What is 3 / 4?"),
    ("What is 3 × 4?", "What is 3 + 4?"),
    ("What is 1.5 + 2?", "What is 15 + 2?"),
    ("What is -5?", "What is 5?"),
    ("What is (2 + 3) * 4?", "What is 2 + 3 * 4?"),
    ("What is 5! + 1", "What is 5 + 1"),
    ("What is 2² + 1?", "What is 22 + 1?"),
    ("What is 1½ + 1?", "What is 11/2 + 1?"),
    ("What is 2**3 * 4?", "What is 23 * 4?"),
    ("Find f'(2).", "Find f(2)."),
    ("What is x-y?", "What is x y?"),
    ("Is it 0.05 or 5?", "Is it 0.5 or 5?"),
    ("Is 10:30 late?", "Is 1030 late?"),
    ("Which of 1, 2, 3 is prime?", "Which of 12, 3 is prime?"),
    ("What does 😀 mean?", "What does 😂 mean?"),
    ("Convert 5 € to $", "Convert 5 £ to $"),
]


def key(text):
    return pl.select(key=normalise_question(pl.lit(text))).item()


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_disguise_makes_no_other_question(disguise):
    assert key(DISGUISES[disguise]) == key(QUESTION)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_changes_the_question_makes_another_one(one, other):
    assert key(one) != key(other)


def test_a_number_has_one_form():
    for value in (0, 7, 1_500, 12_345_678, 1_000_000_000):
        forms = {f"{value}", f"{value:,}", f"{value}.0", f"{value:,}.00", f"{value:,}".replace(",", "\u202f")}
        assert {key(f"is it {form} or not") for form in forms} == {f"is it {value} or not"}


def rows(train, held_out):
    found = [("train", number, text) for number, text in enumerate(train, 1)]
    found += [("eval", number, text) for number, text in enumerate(held_out, 1)]
    return pl.DataFrame(
        [
            {"split": split, "source": f"{split}.jsonl", "line": line, "prompt": [{"role": "user", "content": text}]}
            for split, line, text in found
        ]
    )


@pytest.mark.parametrize(
    "near",
    [
        QUESTION.replace("25", "twenty-five"),
        f"Question: {QUESTION}",
        f"{QUESTION} Answer with a number.",
        "How many apples do they have if Tom has 1,500 apples and café owner Ann has 25?",
    ],
)
def test_near_duplicate_questions_are_reported_with_rows_and_share(near):
    others = [f"A train goes {n} miles in {n + 3} hours; how fast is train number {n * 7}?" for n in range(20)]
    found = near_duplicates(rows([*others[:10], near], [*others[10:], QUESTION]))
    [pair] = found.found
    assert (pair.train, pair.held_out) == ("train.jsonl:11", "eval.jsonl:11")
    # The share by hand, from all substrings of five characters.
    ours, theirs = ({text[at : at + 5] for at in range(len(text) - 4)} for text in (key(near), key(QUESTION)))
    assert pair.share == pytest.approx(len(ours & theirs) / len(theirs), abs=0.1)
    assert found.warning.startswith("1 of 11 training questions (9.1%) are nearly held out: train.jsonl:11 has ")


def test_questions_of_one_template_are_no_near_duplicates():
    frame = "Classify the sentiment of the following sentence as positive or negative, and give a reason: "
    sums = [
        f"Tom has {n} apples and gives {n // 2} of them to Ann. How many apples are left in the basket?" for n in range(10, 50)
    ]
    words = ["Good", "Awful", "Long", "Short", "Bright", "Dull", "Cheap", "Noisy", "Slow", "Fresh", "Strange", "Warm"]
    things = ["film", "meal", "walk", "tale", "song", "game", "trip", "party", "lecture"]
    tasks = [f"{frame}{word} was the {thing}." for word in words for thing in things]
    capitals = [f"What is the capital of {country}?" for country in ("France", "Spain", "Peru", "Chad", "Laos")]
    for questions in (sums, tasks, capitals):
        assert near_duplicates(rows(questions[::2], questions[1::2])).found == []


def test_a_large_split_is_compared_by_a_sample(monkeypatch):
    monkeypatch.setattr(leaks, "NEAR_ROWS", 5)
    assert near_duplicates(rows([QUESTION] * 20, [f"Question: {QUESTION}"])).checked == 5


def test_validation_quarantines_disguises_and_reports_near_duplicates(write, verdict_on, tmp_path):
    def row(text):
        return {"question": text, "answer": "1525"}

    held = write(row(QUESTION), name="held.jsonl")
    train = write(row(DISGUISES["full width"]), row(f"Question: {QUESTION}"), row("What is 1 + 1?"), name="train.jsonl")
    verdict = verdict_on({"train": [{"path": train}], "eval": [{"path": held}]})
    assert verdict.quarantine.select("line", "rule").rows() == [(1, "leak_normalised")]
    [pair] = verdict.near.found
    assert (pair.train.rpartition("/")[2], pair.held_out.rpartition("/")[2]) == ("train.jsonl:2", "held.jsonl:1")
    report_data(replace(verdict), Origin("k", tmp_path, 0.0, []))
    assert "## Nearly held out" in (tmp_path / "report.md").read_text()


def test_blank_means_the_same_for_data_and_for_answers():
    letters = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000] + list(map(chr, range(0xE0000, 0xE0200)))
    # Characters of a Unicode version that one of the two does not know yet.
    known = [letter for letter in letters if unicodedata.category(letter) != "Cn"]
    shown = pl.DataFrame({"letter": known}).select(pl.col("letter").str.contains(SHOWN)).to_series()
    assert [letter for letter, shows in zip(known, shown, strict=True) if shows == is_blank(letter)] == []
