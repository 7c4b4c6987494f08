"""Columns are found by name and by what they hold."""

import pytest

from grpo_tasks.proposal.propose import ColumnChoice, candidates, data_settings, find_equality, find_pattern

CHAT = [{"role": "user", "content": "What is 1 + 1?"}]


def rows(**columns):
    """Forty rows; a callable makes the value of a row from its number."""
    return [{name: make(number) if callable(make) else make for name, make in columns.items()} for number in range(40)]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"question": lambda n: f"What is {n} + 1?", "answer": str}, ColumnChoice("question", None, "answer")),
        ({"id": str, "input": lambda n: f"What is {n} + 1?", "target": lambda n: n}, ColumnChoice("input", None, "target")),
        ({"prompt": CHAT, "answer": str}, ColumnChoice(None, "prompt", "answer")),
        ({"prompt": lambda n: f"Tell me about {n}"}, ColumnChoice("prompt", None, None)),
        ({"question": lambda n: f"Why {n}?", "answer": None}, ColumnChoice("question", None, None)),
        (
            {"Body": lambda n: f"There are {n} cats.", "Question": lambda n: f"How many {n}?", "Answer": float},
            ColumnChoice("Question", None, "Answer", "Body"),
        ),
        (
            {"Beschreibung": lambda n: f"Ein langer Satz mit der Zahl {n}.", "art": lambda n: f"kurz {n}"},
            ColumnChoice("Beschreibung", None, None),
        ),
        ({"question": "always the same", "problem": lambda n: f"What is {n}?"}, ColumnChoice("problem", None, None)),
    ],
)
def test_the_likeliest_reading_comes_first(columns, expected):
    assert candidates(rows(**columns))[0] == expected


def test_a_file_without_text_has_no_reading():
    assert candidates(rows(a=lambda n: n, b=True)) == []


def test_a_prompt_column_that_is_not_used_is_switched_off():
    columns = ["prompt", "quiz", "answer"]
    assert data_settings(ColumnChoice("quiz", None, "answer"), columns, None)["prompt_column"] not in columns
    assert data_settings(ColumnChoice("prompt", None, "answer"), columns, None)["question_column"] == "prompt"


@pytest.mark.parametrize(
    ("answers", "pattern"),
    [
        (["2 + 2 = 4\n#### 4", "so it is\n#### 1,000"], "#### (.+)"),
        ([r"so \boxed{4}", r"\boxed{\pi}"], r"\\boxed\{([^{}]*)\}"),
        (["<answer>4</answer>", "hm <answer>\n5\n</answer>"], r"(?s)<answer>\s*(.*?)\s*</answer>"),
        (["The answer is 4.", "Thus the final answer is: 17"], r"(?i)\banswer is:?\s*(.+?)\.?\s*$"),
        (["4", "5"], None),
        ([], None),
    ],
)
def test_the_mark_of_a_final_answer_is_found(answers, pattern):
    found = find_pattern(answers)
    assert (found and found[0]) == pattern


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truths", "equality"),
    [
        (["4", "-3.5", "1,000", "51.0"], "numeric"),
        (["A", "b", "C"], "choice"),
        (["92 + 31 - 5", "7 * (3 - 1)"], "math"),
        (["Zoey is a knight, and Ethan is a knave.", "Nobody is."], "exact"),
        ([], "exact"),
    ],
)
def test_answers_are_compared_as_what_they_are(truths, equality):
    assert find_equality(truths) == equality
