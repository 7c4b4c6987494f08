"""What an answer is: the contract of extraction and of equality, in one place. Uses no reward, weighs nothing.

Tags are literal and case sensitive: `<answer>`, without attributes or blanks inside. Every scan is linear in the text.

Strict format: the completion is exactly one reasoning block and then exactly one answer block, each of the four tags once, only
whitespace around and between them, and neither block blank.

The answer (what rewards and strict accuracy look at) is the text of the answer block, trimmed, when the completion has exactly
one opening and one closing answer tag, in this order, outside the reasoning, with no tag inside and not blank. With several
answer blocks, nested ones, or one inside the reasoning there is none: no tag wins, so that repeating or stuffing them gains
nothing. A reasoning block that is never closed reaches to the end.

The lenient answer forgives the format: the last answer block wherever it stands (one that is not closed reaches to the next tag
or the end); without any answer tag, the last number within the last 2,000 characters after the reasoning (of everything, when
there is no closing reasoning tag). A last block that is blank gives none.

An empty answer is worth nothing, ever: blank text (whitespace, control, format and filler characters only) is never extracted,
equals nothing, and `Extraction.hollow` tells every built-in reward to give nothing.

Equality compares one answer with one ground truth: a listing such as `42 43 44` equals no number. See numerals.py,
expressions.py and choices.py for the rules of each kind; `exact` is equality of trimmed text after Unicode NFC.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal, Self

from grpo_tasks.answers.choices import choice_letter
from grpo_tasks.answers.expressions import expressions_equal
from grpo_tasks.answers.numerals import parse_number
from schemas.config.rewards import TagsConfig

Equality = Literal["exact", "numeric", "math", "choice"]

LENIENT_WINDOW = 2_000
"""Characters at the end of a completion in which a last number is looked for."""
MAX_ANSWER_CHARS = 10_000
"""A longer prediction equals nothing."""

# Printable to Python, and yet nothing to see: Braille blank and the Hangul fillers.
_FILLERS = frozenset("\u2800\u3164\u115f\u1160\uffa0")
# A sign right behind a digit or a closing bracket is an operator: "54-21" ends in 21.
_NUMBER = re.compile(r"(?:(?<![\d)\]])[-\u2212])?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Tags:
    """Names of the two blocks."""

    reasoning: str = "reasoning"
    answer: str = "answer"

    @classmethod
    def of(cls, config: TagsConfig) -> Self:
        """The tags a configuration names."""
        return cls(reasoning=config.reasoning, answer=config.answer)

    @property
    def in_order(self) -> list[str]:
        """The four tags as they should follow each other."""
        return [f"<{self.reasoning}>", f"</{self.reasoning}>", f"<{self.answer}>", f"</{self.answer}>"]


@dataclass(frozen=True, slots=True)
class Extraction:
    """What was found in one completion."""

    answer: str | None
    """The answer by the strict contract; None when there is none."""
    reasoning: str | None
    """Text of the one reasoning block; None when there is not exactly one."""
    strict_format: bool
    """Whether the whole completion keeps the format."""
    lenient_answer: str | None
    """The last thing that looks like an answer."""
    answer_blocks: int
    """How often the opening answer tag occurs."""
    tags_in_place: int
    """Tags (0 to 4) that occur exactly once and after all of those that belong before them; the two around blank reasoning do not
    count."""
    trailing_chars: int
    """Characters after the last closing answer tag, whitespace at either end not counted."""
    stuffed: bool
    """Whether a tag occurs more than once."""
    empty_answer: bool
    """Whether the last answer block is blank or, without one, everything beside the tags."""

    @property
    def hollow(self) -> bool:
        """Whether no built-in reward may give anything: an empty answer, or stuffed tags."""
        return self.stuffed or self.empty_answer


def is_blank(text: str) -> bool:
    """Whether there is nothing to see: only whitespace, control, format and filler characters."""
    # The beginning first: it nearly always decides, and a set over a million characters costs tens of milliseconds.
    return not _shows_something(text[:1_000]) and not _shows_something(text[1_000:])


def extract_answer(text: str, tags: Tags) -> Extraction:
    """Read one completion by the contract of this module; linear in its length."""
    order = tags.in_order
    counts = [text.count(tag) for tag in order]
    first = [text.find(tag) for tag in order]
    reasoning = _between(text, order[0], order[1]) if counts[:2] == [1, 1] else None
    block = _last_block(text, order)
    # Each part is looked at once: whether a long text is blank is the dearest question here.
    no_work = reasoning is not None and is_blank(reasoning)
    no_answer = is_blank(_without_tags(text, order) if block is None else block)
    return Extraction(
        answer=None if no_answer else _answer(text, order, counts),
        reasoning=reasoning,
        strict_format=not (no_work or no_answer) and _strict(text, order, counts, first),
        lenient_answer=None if no_answer else _lenient(text, order, block),
        answer_blocks=counts[2],
        tags_in_place=_in_place(counts, first) - (2 if no_work else 0),
        trailing_chars=len(text[text.rfind(order[3]) + len(order[3]) :].strip()) if counts[3] else 0,
        stuffed=max(counts) > 1,
        empty_answer=no_answer,
    )


def answers_equal(prediction: str, truth: str, how: Equality) -> bool:
    """Whether a prediction is the ground truth; blank and overlong predictions never are.

    Args:
        prediction: text of an answer, not of a whole completion.
        truth: ground truth as the data has it.
        how: exact (text), numeric (value), math (expression, by math-verify) or choice (letter).
    """
    prediction, truth = prediction.strip(), truth.strip()
    if len(prediction) > MAX_ANSWER_CHARS or is_blank(prediction) or is_blank(truth):
        return False
    if how == "exact":
        return unicodedata.normalize("NFC", prediction) == unicodedata.normalize("NFC", truth)
    if how == "choice":
        letter = choice_letter(prediction)
        return letter is not None and letter == choice_letter(truth)
    number, wanted = parse_number(prediction), parse_number(truth)
    if how == "numeric" or (number is not None and wanted is not None):
        return number is not None and number == wanted
    return prediction == truth or expressions_equal(prediction, truth)


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
    ends = [place + len(tag) for place, tag in zip(first, order, strict=True)]
    outside = (text[: first[0]], text[ends[1] : first[2]], text[ends[3] :])
    return not any(part.strip() for part in outside)


def _answer(text: str, order: list[str], counts: list[int]) -> str | None:
    found = _between(text, order[2], order[3]) if counts[2:] == [1, 1] else None
    if found is None or any(tag in found for tag in order[:2]):
        return None
    return None if _inside_reasoning(text, order) else found.strip()


def _inside_reasoning(text: str, order: list[str]) -> bool:
    opening, closing, place = order[0], order[1], text.find(order[2])
    if text.rfind(opening, 0, place) > text.rfind(closing, 0, place):
        return True
    # Closed only after the answer, and not because another block was opened there: the answer stands inside.
    next_closing, next_opening = text.find(closing, place), text.find(opening, place)
    return next_closing >= 0 and not 0 <= next_opening < next_closing


def _in_place(counts: list[int], first: list[int]) -> int:
    return sum(
        count == 1 and all(before < place for before in first[:index])
        for index, (count, place) in enumerate(zip(counts, first, strict=True))
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
