"""The letter of a multiple choice answer. Does not match the text of an option against its letter.

Accepted: the letter alone in any decoration (B, (b), [B], **B**, B.), or the letter with its mark and the option's text
((B) Paris, B) Paris, B. Paris, B: Paris). Two marked letters in one answer are a listing, and no choice.
"""

import re

MAX_CHOICE_CHARS = 300
"""Longer text is no choice."""

_ALONE = re.compile(r"[\s*_(\[{\"'$]*([A-Za-z])[\s*_)\]}\"'$.:]*")
_MARKED = re.compile(r"[\s*_(\[]*([A-Za-z])[)\].:][\s*_]*\S")
_MARK = re.compile(r"(?<!\w)[A-Z][).:\]]")


def choice_letter(text: str) -> str | None:
    """The chosen letter in upper case, or None when the text is not one choice."""
    if len(text) > MAX_CHOICE_CHARS:
        return None
    alone = _ALONE.fullmatch(text)
    if alone:
        return alone[1].upper()
    marked = _MARKED.match(text)
    # More than the first mark means that options are being listed.
    if marked is None or _MARK.search(text, marked.end(1) + 1):
        return None
    return marked[1].upper()
