"""Which text of a completion is its answer: the one definition that rewards and evaluation share.

Tags are literal and case-sensitive: `<answer>`, without attributes or spaces inside. Every scan is linear in the text.

Strict format. The completion is exactly one reasoning block followed by exactly one answer block. Each of the four tags occurs
once, only whitespace stands around and between the blocks, and neither block is blank.

Answer (used by rewards and by strict accuracy). The trimmed text of the answer block. The completion must have exactly one
opening and one closing answer tag, in this order, outside the reasoning. The block holds no other tag and is not blank. With
several answer blocks, nested blocks or a block inside the reasoning there is no answer. No block wins, so repeating or stuffing
tags gains nothing. A reasoning block that is never closed reaches to the end.

Lenient answer (used by lenient accuracy). It forgives the format: the last answer block, wherever it stands. A block that is not
closed ends at the next tag or at the end of the text. Without any answer tag it is the last number in the last 2,000 characters
after the reasoning, or of the whole text when no reasoning block is closed. When the last block is blank there is none.

An empty answer never earns anything. Blank text (only whitespace, control, format and filler characters) is never extracted and
equals nothing, and every built-in reward gives its lowest score when `Extraction.worthless` is set.
"""

import re
from dataclasses import dataclass
from typing import Self

from schemas.config.completion import TagsConfig

LENIENT_WINDOW = 2_000
"""Characters at the end of a completion that are searched for a last number."""

# Python calls these printable, yet they show nothing: Braille blank and the Hangul fillers.
_FILLERS = frozenset("\u2800\u3164\u115f\u1160\uffa0")
# A minus right after a digit or a closing bracket is an operator, not a sign: "54-21" ends in 21. The pattern succeeds at every
# digit and never has to backtrack, so the search is linear.
_NUMBER = re.compile(r"(?:(?<![\d)\]])[-\u2212])?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Tags:
    """Names of the two blocks."""

    reasoning: str = "reasoning"
    answer: str = "answer"

    @classmethod
    def of(cls, config: TagsConfig) -> Self:
        """The tags that a configuration names."""
        return cls(reasoning=config.reasoning, answer=config.answer)

    @property
    def in_order(self) -> list[str]:
        """The four tags in the order of the strict format."""
        return [f"<{self.reasoning}>", f"</{self.reasoning}>", f"<{self.answer}>", f"</{self.answer}>"]


@dataclass(frozen=True, slots=True)
class Extraction:
    """What one completion contains."""

    answer: str | None
    """The answer by the strict rules; None when there is none."""
    reasoning: str | None
    """Text of the reasoning block; None unless there is exactly one."""
    strict_format: bool
    """Whether the whole completion keeps the strict format."""
    lenient_answer: str | None
    """The answer by the lenient rules; None when there is none."""
    answer_blocks: int
    """How often the opening answer tag occurs."""
    ordered_tags: int
    """How many of the four tags (0 to 4) occur exactly once and after all the tags that precede them in the strict format. The
    tags around a blank reasoning block do not count."""
    trailing_chars: int
    """Characters after the last closing answer tag, without surrounding whitespace."""
    stuffed: bool
    """Whether any tag occurs more than once."""
    empty_answer: bool
    """Whether the last answer block is blank. Without an answer block: whether all text besides the tags is blank."""

    @property
    def worthless(self) -> bool:
        """Whether no built-in reward may pay for this completion: its answer is empty or a tag is repeated."""
        return self.stuffed or self.empty_answer


def is_blank(text: str) -> bool:
    """Whether the text shows nothing: only whitespace, control, format and filler characters."""
    # The beginning decides nearly every case. A set over a million characters costs tens of milliseconds.
    return not _shows_something(text[:1_000]) and not _shows_something(text[1_000:])


def extract_answer(text: str, tags: Tags) -> Extraction:
    """Read one completion by the rules of this module, in time linear in its length."""
    order = tags.in_order
    counts = [text.count(tag) for tag in order]
    first = [text.find(tag) for tag in order]
    reasoning = _between(text, order[0], order[1]) if counts[:2] == [1, 1] else None
    block = _last_block(text, order)
    # Each text is tested for blankness once: for a long text it is the most expensive test here.
    blank_reasoning = reasoning is not None and is_blank(reasoning)
    blank_answer = is_blank(_without_tags(text, order) if block is None else block)
    return Extraction(
        answer=None if blank_answer else _answer(text, order, counts),
        reasoning=reasoning,
        strict_format=not (blank_reasoning or blank_answer) and _strict(text, order, counts, first),
        lenient_answer=None if blank_answer else _lenient(text, order, block),
        answer_blocks=counts[2],
        ordered_tags=_ordered(counts, first) - (2 if blank_reasoning else 0),
        trailing_chars=len(text[text.rfind(order[3]) + len(order[3]) :].strip()) if counts[3] else 0,
        stuffed=max(counts) > 1,
        empty_answer=blank_answer,
    )


def _shows_something(text: str) -> bool:
    return any(letter.isprintable() and letter != " " and letter not in _FILLERS for letter in set(text))


def _between(text: str, opening: str, closing: str) -> str | None:
    start = text.find(opening)
    end = text.find(closing, start)
    return text[start + len(opening) : end] if start >= 0 and end >= 0 else None


def _without_tags(text: str, order: list[str]) -> str:
    for tag in order:
        text = text.replace(tag, "")
    return text


def _strict(text: str, order: list[str], counts: list[int], first: list[int]) -> bool:
    if counts != [1, 1, 1, 1] or first != sorted(first):
        return False
    ends = [start + len(tag) for start, tag in zip(first, order, strict=True)]
    outside = (text[: first[0]], text[ends[1] : first[2]], text[ends[3] :])
    return not any(piece.strip() for piece in outside)


def _answer(text: str, order: list[str], counts: list[int]) -> str | None:
    found = _between(text, order[2], order[3]) if counts[2:] == [1, 1] else None
    if found is None or any(tag in found for tag in order[:2]):
        return None
    return None if _inside_reasoning(text, order) else found.strip()


def _inside_reasoning(text: str, order: list[str]) -> bool:
    opening, closing, start = order[0], order[1], text.find(order[2])
    if text.rfind(opening, 0, start) > text.rfind(closing, 0, start):
        return True
    # The next reasoning tag after the answer closes a block: the answer stands inside it, even if the opening tag is missing.
    next_closing, next_opening = text.find(closing, start), text.find(opening, start)
    return next_closing >= 0 and not 0 <= next_opening < next_closing


def _ordered(counts: list[int], first: list[int]) -> int:
    # A missing tag has position -1 and so precedes every other one.
    return sum(
        count == 1 and all(before < start for before in first[:index])
        for index, (count, start) in enumerate(zip(counts, first, strict=True))
    )


def _last_block(text: str, order: list[str]) -> str | None:
    start = text.rfind(order[2])
    if start < 0:
        return None
    start += len(order[2])
    ends = [end for tag in order if (end := text.find(tag, start)) >= 0]
    return text[start : min(ends, default=len(text))]


def _lenient(text: str, order: list[str], block: str | None) -> str | None:
    if block is not None:
        return block.strip()
    closed = text.rfind(order[1])
    rest = text[closed + len(order[1]) :] if closed >= 0 else text
    numbers = _NUMBER.findall(rest[-LENIENT_WINDOW:])
    return numbers[-1].rstrip(",") if numbers else None
