"""Ground truth in a tidy form: `$1,234.50` -> `1234.5`, `51.0` -> `51`, `−7` -> `-7`; what is no number stays as it is written.

A function for one text and a polars expression for a column, made from the same table of replacements; a test holds them
equal. Deliberately not here: whether two answers are equal (grpo_tasks/rewards), units, fractions, scientific notation.
"""

import re

import polars as pl

BLANKS = " \t\n\r\x0b\x0c\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
INVISIBLE = "\u200b\u2060\ufeff"
_MAX_NUMBER_LENGTH = 400  # longer digit strings are left alone: no answer, and the expressions stay cheap

_SIGN = "[-+\u2212]"
_CURRENCY = "[$€£¥₹]"
_GROUPED = "|".join(f"[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{3}})+" for mark in (",", "\u00a0", "\u202f", "\u2009"))
_DIGITS = rf"(?:(?:{_GROUPED}|0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)"
_GAP = "[ \u00a0\u202f\u2009]?"
_TIDY = "^(?:0|-?[1-9][0-9]*)$"
_NUMBER = rf"^(?:{_SIGN}{_GAP}{_CURRENCY}?|{_CURRENCY}{_GAP}{_SIGN}?)?{_GAP}{_DIGITS}(?:{_GAP}(?:%|{_CURRENCY}))?\.?$"

_TIDY_TEXT: tuple[tuple[str, str], ...] = (
    (f"[{INVISIBLE}]", ""),
    # a no-break blank in the middle of words looks like a blank and is one
    ("\u00a0", " "),
)
_TIDY_NUMBER: tuple[tuple[str, str], ...] = (
    ("\u2212", "-"),
    (rf"[+,$€£¥₹{BLANKS}]", ""),
    (r"\.$", ""),
    (r"^(-?)\.", "${1}0."),
    (r"(\.[0-9]*?)0+(%?)$", "${1}${2}"),
    (r"\.(%?)$", "${1}"),
    (r"^-0(%?)$", "0${1}"),
)


def normalise_answer(text: str) -> str:
    """The tidy form of one answer; empty when there is nothing but blanks."""
    text = re.sub(_TIDY_TEXT[0][0], "", text).strip(BLANKS)
    number = len(text) <= _MAX_NUMBER_LENGTH and re.search(_NUMBER, text)
    for pattern, replacement in _TIDY_NUMBER if number else _TIDY_TEXT:
        text = re.sub(pattern, re.sub(r"\$\{(\d)\}", r"\\g<\1>", replacement), text)
    return text


def normalised(answer: pl.Expr) -> pl.Expr:
    """`normalise_answer` for a column of strings; null stays null."""
    # Most answers are tidy whole numbers; nulls in their place cost the dozen replacements nothing.
    tidy = answer.str.contains(_TIDY)
    text = pl.when(~tidy).then(answer).str.replace_all(*_TIDY_TEXT[0]).str.strip_chars(BLANKS)
    number = (text.str.len_chars() <= _MAX_NUMBER_LENGTH) & text.str.contains(_NUMBER)
    fixed = pl.when(number).then(_replace(text, _TIDY_NUMBER)).otherwise(_replace(text, _TIDY_TEXT))
    return pl.when(tidy).then(answer).otherwise(fixed)


def _replace(text: pl.Expr, table: tuple[tuple[str, str], ...]) -> pl.Expr:
    for pattern, replacement in table:
        text = text.str.replace_all(pattern, replacement)
    return text
