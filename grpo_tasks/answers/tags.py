"""Format `tags`: an answer block, after a reasoning block where the config names one. Tags are literal: `<answer>`.

strict    exactly one reasoning block, then exactly one answer block, neither blank, only whitespace around them. Without a
          reasoning tag any text before the answer block is the reasoning
answer    the trimmed text of the only answer block outside of the reasoning. Several, nested or stuffed blocks give none: no
          block wins, so repeating tags gains nothing
lenient   the last answer block wherever it stands, closed or not; without any, the last number in the last 2,000 characters
          after the reasoning
"""

from collections.abc import Iterator

from grpo_tasks.answers.extraction import Extraction, is_blank, last_number
from schemas.config.completion import CompletionConfig


def write_tags(answer: str, reasoning: str, completion: CompletionConfig) -> Iterator[str]:
    """The answer in its block, behind the reasoning."""
    yield completion.tags.block(reasoning, answer)


def read_tags(text: str, completion: CompletionConfig) -> Extraction:
    """Read one completion by the rules of this module, in time linear in its length."""
    order = completion.tags.in_order
    counts = [text.count(tag) for tag in order]
    first = [text.find(tag) for tag in order]
    if len(order) == 4:
        reasoning = _between(text, order[0], order[1]) if counts[:2] == [1, 1] else None
    else:
        reasoning = text[: first[0]] if counts == [1, 1] else None
    block, untagged = _last_block(text, order), text
    for tag in order if block is None else ():
        untagged = untagged.replace(tag, "")
    # Each text is tested for blankness once: for a long text it is the most expensive test here.
    blank_reasoning = len(order) == 4 and reasoning is not None and is_blank(reasoning)
    blank_answer = is_blank(untagged if block is None else block)
    # A missing tag has position -1 and so precedes every other one.
    ordered = sum(
        count == 1 and all(before < start for before in first[:index])
        for index, (count, start) in enumerate(zip(counts, first, strict=True))
    )
    return Extraction(
        answer=None if blank_answer else _answer(text, order, counts),
        reasoning=reasoning,
        strict_format=not (blank_reasoning or blank_answer) and _strict(text, order, counts, first),
        lenient_answer=None if blank_answer else _lenient(text, order, block),
        ordered_tags=ordered - (2 if blank_reasoning else 0),
        trailing_chars=len(text[text.rfind(order[-1]) + len(order[-1]) :].strip()) if counts[-1] else 0,
        stuffed=max(counts) > 1,
        empty_answer=blank_answer,
    )


def _between(text: str, opening: str, closing: str) -> str | None:
    start = text.find(opening)
    end = text.find(closing, start)
    return text[start + len(opening) : end] if start >= 0 and end >= 0 else None


def _strict(text: str, order: list[str], counts: list[int], first: list[int]) -> bool:
    if set(counts) != {1} or first != sorted(first):
        return False
    ends = [start + len(tag) for start, tag in zip(first, order, strict=True)]
    # Before the first tag stands nothing, unless that text is the reasoning.
    around = [text[: first[0]], text[ends[1] : first[2]]] if len(order) == 4 else []
    return not any(piece.strip() for piece in [*around, text[ends[-1] :]])


def _answer(text: str, order: list[str], counts: list[int]) -> str | None:
    found = _between(text, order[-2], order[-1]) if counts[-2:] == [1, 1] else None
    if found is None or any(tag in found for tag in order[:-2]):
        return None
    return None if len(order) == 4 and _inside_reasoning(text, order) else found.strip()


def _inside_reasoning(text: str, order: list[str]) -> bool:
    opening, closing, start = order[0], order[1], text.find(order[2])
    if text.rfind(opening, 0, start) > text.rfind(closing, 0, start):
        return True
    # The next reasoning tag after the answer closes a block: the answer stands inside it, even if the opening tag is missing.
    next_closing, next_opening = text.find(closing, start), text.find(opening, start)
    return next_closing >= 0 and not 0 <= next_opening < next_closing


def _last_block(text: str, order: list[str]) -> str | None:
    start = text.rfind(order[-2])
    if start < 0:
        return None
    start += len(order[-2])
    ends = [end for tag in order if (end := text.find(tag, start)) >= 0]
    return text[start : min(ends, default=len(text))]


def _lenient(text: str, order: list[str], block: str | None) -> str | None:
    if block is not None:
        return block.strip()
    closed = text.rfind(order[1]) if len(order) == 4 else -1
    return last_number(text[closed + len(order[1]) :] if closed >= 0 else text)
