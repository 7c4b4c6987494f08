"""What a completion contains, whatever its format, and which text counts as blank."""

import re
import unicodedata
from dataclasses import dataclass

LENIENT_WINDOW = 2_000
"""Characters at the end of a completion that are searched for a last number."""

# Python calls these printable, yet they show nothing: Braille blank, the Hangul fillers and the null notehead.
_FILLERS = frozenset("\u2800\u3164\u115f\u1160\uffa0\U0001d159")
# A minus right after a digit or a closing bracket is an operator, not a sign: "54-21" ends in 21. The pattern succeeds at every
# digit and never has to backtrack, so the search is linear.
_NUMBER = re.compile(r"(?:(?<![\d)\]])[-\u2212])?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Extraction:
    """What one completion contains, by the rules of its format."""

    answer: str | None
    """By the strict rules."""
    strict_format: bool
    """Whether the whole completion keeps the format."""
    lenient_answer: str | None
    empty_answer: bool
    """Whether the answer is blank. Without an answer: whether the whole text, tags aside, is blank."""
    reasoning: str | None = None
    """Text of the reasoning block, or the text before the answer where the format has no such block."""
    trailing_chars: int = 0
    """Characters after the answer and what surrounds it, without surrounding whitespace."""
    ordered_tags: int = 0
    """Format tags: how many of the tags (0 to 4) occur exactly once and after all tags that precede them in the strict format.
    The tags around a blank reasoning block do not count."""
    stuffed: bool = False
    """Format tags: whether any tag occurs more than once."""

    @property
    def worthless(self) -> bool:
        """No built-in reward may pay for this completion: its answer is empty or a tag is repeated."""
        return self.stuffed or self.empty_answer


def is_blank(text: str) -> bool:
    """Whether the text shows nothing: only whitespace, control, format and filler characters, and marks without a letter."""
    # The beginning decides nearly every case. A set over a million characters costs tens of milliseconds.
    return not _shows_something(text[:1_000]) and not _shows_something(text[1_000:])


def last_number(text: str) -> str | None:
    """The last number in the last LENIENT_WINDOW characters; None when there is none."""
    numbers = _NUMBER.findall(text[-LENIENT_WINDOW:])
    return numbers[-1].rstrip(",") if numbers else None


def nesting(text: str, opening: str, closing: str) -> int:
    """The deepest nesting of these brackets, those inside strings included: an upper bound."""
    depth = deepest = 0
    for letter in text:
        if letter in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif letter in closing:
            depth -= 1
    return deepest


def _shows_something(text: str) -> bool:
    # Marks (accents, variation selectors, enclosing marks) change the letter before them, and are nothing without one.
    return any(
        letter.isprintable() and letter != " " and letter not in _FILLERS and not unicodedata.category(letter).startswith("M")
        for letter in set(text)
    )
