"""The letter of a multiple choice answer. The text of an option is not matched against its letter.

Accepted: the letter alone with any decoration (B, (b), [B], **B**, B.), or the letter with its mark and the text of the option
((B) Paris, B) Paris, B. Paris, B: Paris). An answer with two marked letters, or with a second letter alone, lists options and
chooses none: (a) Paris (b) Rome, A) or B.
"""

import re

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


def choice_letter(text: str) -> str | None:
    """The chosen letter in upper case, or None when the text is not one choice."""
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
