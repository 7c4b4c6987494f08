r"""Read an answer that is one number, as an exact fraction. Text around the number is never skipped: `42 apples` is no number.

Accepted: a sign, digits with a comma every three, decimals, an exponent of up to three digits (1e3), a fraction (3/4), one
currency or percent sign, one full stop at the end, and LaTeX or Markdown around it ($42$, \boxed{42}, **42**). Percent and
currency do not change the value: 42% = 42. A decimal comma is not guessed. Digits of one script count by their value (٤٢ = 42).

Only `math` rounds (expressions.py): a decimal with at least six decimals and six significant digits equals every value that
rounds to it. 0.333333 = 1/3; 0.333 is not 1/3, and 0.50000001 is not 1/2.
"""

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

MAX_NUMBER_CHARS = 200
"""Longer text is never a number. It bounds the pattern and the size of the fraction."""

ROUNDED_DECIMALS = 6
"""A decimal with at least as many decimals, and as many significant digits, may be a rounded value."""

_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"))
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
# The exponent has at most three digits: 1e9999999 would take gigabytes as a fraction.
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s?{_CURRENCY}?\s?(?P<inner>[+-]?)"
    rf"(?P<number>(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}})?)"
    rf"(?:\s?/\s?(?P<below>[0-9]+))?(?:\s?\\?%|\s?{_CURRENCY})?\.?"
)
_WRAPPINGS = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("\\boxed{", "}"), ("**", "**"), ("\\text{", "}"))


def parse_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number; None for everything else."""
    match = _match(text)
    if match is None or (match["sign"] and match["inner"]) or (match["below"] and not int(match["below"])):
        return None
    value = Fraction(Decimal(match["number"].replace(",", ""))) / int(match["below"] or 1)
    return -value if "-" in (match["sign"], match["inner"]) else value


def rounding(*texts: str) -> Fraction:
    """How far two values may lie apart that are written as these texts: half a unit of the last decimal of the more precise one.

    Zero unless one of them is a long decimal. Two decimals are equal only when they are the same number.
    """
    allowed = []
    for match in map(_match, texts):
        whole, _, decimals = (match["number"] if match and not match["below"] else "").replace(",", "").partition(".")
        if decimals.isdecimal() and min(len(decimals), len((whole + decimals).lstrip("0"))) >= ROUNDED_DECIMALS:
            allowed.append(Fraction(1, 2 * 10 ** len(decimals)))
    return min(allowed, default=Fraction(0))


def _match(text: str) -> re.Match[str] | None:
    if len(text) > MAX_NUMBER_CHARS:
        return None
    plain = unwrap(text).translate(_MINUS)
    # Every script keeps its ten digits in a row, so the position of its zero identifies it. A number has one script.
    if len({ord(letter) - unicodedata.decimal(letter) for letter in plain if letter.isdecimal()}) > 1:
        return None
    return _NUMBER.fullmatch("".join(str(unicodedata.decimal(one)) if one.isdecimal() else one for one in plain))


def unwrap(text: str) -> str:
    """Strip whitespace, invisible characters and at most three layers of LaTeX or Markdown from both ends."""
    text = _trim(text)
    for _ in range(3):
        for opening, closing in _WRAPPINGS:
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                text = _trim(text[len(opening) : -len(closing)])
    return text


def _trim(text: str) -> str:
    start, end = 0, len(text)
    while start < end and _invisible(text[start]):
        start += 1
    while end > start and _invisible(text[end - 1]):
        end -= 1
    return text[start:end]


def _invisible(letter: str) -> bool:
    return letter.isspace() or unicodedata.category(letter) == "Cf"
