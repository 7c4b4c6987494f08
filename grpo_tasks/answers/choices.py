"""The letter of a multiple choice answer. The text of an option is not matched against its letter.

Accepted: the letter alone with any decoration (B, (b), [B], **B**, B.), or the letter with its mark and the text of the option
((B) Paris, B) Paris, B. Paris, B: Paris). An answer with two marked letters lists options and chooses none.
"""

import re

MAX_CHOICE_CHARS = 300
"""Longer text is never a choice. It bounds the time that the patterns below take."""

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
    # A second mark means that the answer lists options.
    if marked is None or _MARK.search(text, marked.end(1) + 1):
        return None
    return marked[1].upper()
