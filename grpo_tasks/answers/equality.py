"""When an answer is right: one prediction compared with one ground truth.

    exact    the same text after trimming and Unicode NFC
    numeric  exactly the same value              (numerals.py)
    math     the same mathematical expression    (expressions.py)
    choice   the same letter                     (choices.py)

A blank prediction equals nothing, not even a blank ground truth. A listing such as `42 43 44` equals no number.
"""

import unicodedata
from collections.abc import Iterable

from grpo_tasks.answers.choices import choice_letter
from grpo_tasks.answers.expressions import expressions_equal
from grpo_tasks.answers.extraction import is_blank
from grpo_tasks.answers.numerals import parse_number, rounding
from schemas.config.completion import Equality

MAX_ANSWER_CHARS = 10_000
"""A longer prediction is never right. It bounds the work for `exact`; the other kinds have tighter bounds of their own."""


def answers_equal(prediction: str, truth: str, how: Equality) -> bool:
    """Whether an answer equals the ground truth as it stands in the data. Never raises, whatever the text."""
    prediction, truth = prediction.strip(), truth.strip()
    if len(prediction) > MAX_ANSWER_CHARS or is_blank(prediction) or is_blank(truth):
        return False
    if how == "exact":
        # NFC, because the same accented letter may be written as one code point or as two.
        return unicodedata.normalize("NFC", prediction) == unicodedata.normalize("NFC", truth)
    if how == "choice":
        letter = choice_letter(prediction)
        return letter is not None and letter == choice_letter(truth)
    number, expected = parse_number(prediction), parse_number(truth)
    if how == "numeric":
        return number is not None and number == expected
    if number is not None and expected is not None:
        # Two plain numbers need no sympy, which takes a thousand times as long.
        return number == expected or abs(number - expected) <= rounding(prediction, truth)
    return prediction == truth or expressions_equal(prediction, truth)


def equals_any(prediction: str, truths: Iterable[str], how: Equality) -> bool:
    """Whether a prediction equals one of several ground truths."""
    return any(answers_equal(prediction, truth, how) for truth in truths)
