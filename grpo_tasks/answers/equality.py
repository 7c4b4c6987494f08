"""When an answer is right: one prediction compared with one ground truth.

    exact    the same text after trimming and Unicode NFC
    numeric  exactly the same value              (numerals.py)
    math     the same mathematical expression    (expressions.py)
    choice   the same letter of a multiple choice; the text of an option is not matched against its letter
    json     the same JSON value, whatever the order of its keys and the form of its numbers; what is no JSON counts as exact text

A blank prediction equals nothing, not even a blank ground truth. A listing such as `42 43 44` equals no number.
"""

import json
import re
import unicodedata
from collections.abc import Iterable

from grpo_tasks.answers.expressions import expressions_equal
from grpo_tasks.answers.extraction import is_blank
from grpo_tasks.answers.numerals import parse_number, rounding
from grpo_tasks.answers.objects import finite_number, unique_keys
from schemas.config.completion import Equality

MAX_ANSWER_CHARS = 10_000
"""A longer prediction is never right. It bounds the work for `exact`; the other kinds have tighter bounds of their own."""
MAX_CHOICE_CHARS = 300
"""Longer text is never a choice. It bounds the time that the patterns below take."""

_ALONE = re.compile(r"[\s*_(\[{\"'$]*([A-Za-z])[\s*_)\]}\"'$.:]*")
_MARKED = re.compile(r"[\s*_(\[]*([A-Za-z])[)\].:][\s*_]*\S")
# A capital or small letter. U.S., e.g. and f(a) hold none. A small letter that ends a sentence (5 g.) or stands in a ratio (a:b)
# marks nothing, and (i) is a numeral.
_MARK = re.compile(
    r"(?<![\w])(?<!\w[(.])(?:[A-Z](?:[):\]]|\.(?![A-Za-z]\.))|[a-hj](?:[)\]]|[.:](?=\s+\S|\w\w)))",
)
_BETWEEN = re.compile(r"[\s*_)\]}.:]*(?:or\b|and\b|[,/|&;])?")


def answers_equal(prediction: str, truth: str, how: Equality) -> bool:
    """Whether an answer equals the ground truth as it stands in the data. Never raises, whatever the text."""
    prediction, truth = prediction.strip(), truth.strip()
    if len(prediction) > MAX_ANSWER_CHARS or is_blank(prediction) or is_blank(truth):
        return False
    if how in ("exact", "json"):
        # NFC, because the same accented letter may be written as one code point or as two.
        given, expected = (unicodedata.normalize("NFC", text) for text in (prediction, truth))
        return given == expected or (
            how == "json" and _json_form(given) is not None and _json_form(given) == _json_form(expected)
        )
    if how == "choice":
        letter = choice_letter(prediction)
        return letter is not None and letter == choice_letter(truth)
    number, value = parse_number(prediction), parse_number(truth)
    if how == "numeric":
        return number is not None and number == value
    if number is not None and value is not None:
        # Two plain numbers need no sympy, which takes a thousand times as long.
        return number == value or abs(number - value) <= rounding(prediction, truth)
    return prediction == truth or expressions_equal(prediction, truth)


def _json_form(text: str) -> str | None:
    """A JSON text with its keys in order and whole numbers as integers; None for any other text."""

    def number(digits: str) -> float | int:
        value = finite_number(digits)
        return int(value) if value.is_integer() else value

    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_float=number, parse_constant=finite_number)
    except (ValueError, RecursionError):
        return None
    return json.dumps(value, sort_keys=True)


def equals_any(prediction: str, truths: Iterable[str], how: Equality) -> bool:
    """Whether a prediction equals one of several ground truths."""
    return any(answers_equal(prediction, truth, how) for truth in truths)


def choice_letter(text: str) -> str | None:
    """The chosen letter in upper case, or None when the text is not one choice.

    Accepted: the letter alone with any decoration (B, (b), [B], **B**, B.), or the letter with its mark and the text of the
    option ((B) Paris, B) Paris, B. Paris, B: Paris). An answer with two marked letters, or with a second letter alone, lists
    options and chooses none: (a) Paris (b) Rome, A) or B.
    """
    if len(text) > MAX_CHOICE_CHARS:
        return None
    alone = _ALONE.fullmatch(text)
    if alone:
        return alone[1].upper()
    marked = _MARKED.match(text)
    if marked is None:
        return None
    letter, rest = marked[1].upper(), text[marked.end(1) + 1 :]
    other = _ALONE.fullmatch(_BETWEEN.sub("", rest, count=1))
    if _MARK.search(rest) or (other and other[1].upper() != letter):
        return None
    return letter
