"""The formats of completions: which text is the answer. Rewards, evaluation and the lab share this one definition.

A new format is its name and its settings in schemas/config/completion.py, and a `Format` in `FORMATS` here.

An empty answer never earns anything. Blank text (only whitespace, control, format and filler characters) is never extracted and
equals nothing, and every built-in reward gives its lowest score when `Extraction.worthless` is set.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_tasks.answers.equality import answers_equal
from grpo_tasks.answers.extraction import Extraction, is_blank, last_number
from grpo_tasks.answers.objects import check_schema, read_object, write_object
from grpo_tasks.answers.patterns import check_pattern, read_pattern, write_pattern
from schemas.config.completion import CompletionConfig

BOX = "\\boxed{"


@dataclass(frozen=True, slots=True)
class Format:
    """All that there is to know about a format."""

    read: Callable[[str, CompletionConfig], Extraction]
    """What a completion contains. It takes time linear in the text and never raises."""
    write: Callable[[str, str, CompletionConfig], Iterator[str]] = lambda *_: iter(())
    """Completions that may give this answer after this reasoning, the best first; `perfect_completion` reads each back."""
    empty: Callable[[CompletionConfig], dict[str, str]] = lambda _: {}
    """Completions that have the form and nothing in it, by the names of their probes (grpo_tasks/lab/probes.py)."""
    check: Callable[[CompletionConfig], None] = lambda _: None
    """Raises `ConfigError` for settings that cannot be used. Reading a config does not import what can tell."""


def extract(text: str, completion: CompletionConfig) -> Extraction:
    """Read one completion in the configured format. Never raises, whatever the text."""
    return FORMATS[completion.format].read(text, completion)


def check_completion(completion: CompletionConfig) -> None:
    """ConfigError for a pattern or a JSON Schema that cannot be used."""
    FORMATS[completion.format].check(completion)


def perfect_completion(
    answer: str | None, completion: CompletionConfig, *, reasoning: str = "Working it out step by step."
) -> str | None:
    """A completion from which `extract` reads this answer in the strict format; None when none can be made.

    Without an answer (a row without ground truth) only a JSON object can be made. Without `answer_key` a JSON object is the whole
    answer. `reasoning` must not hold the format's marks.
    """
    answer = None if answer is None else answer.strip()
    if answer is None and completion.has_answer:
        return None
    for text in FORMATS[completion.format].write(answer or "", reasoning, completion):
        found = extract(text, completion)
        read = found.answer if answer is None or completion.has_answer else text
        equal = read == answer or (completion.format == "json" and answers_equal(read or "", answer or "", "json"))
        if found.strict_format and equal:
            return text
    return None


def read_tags(text: str, completion: CompletionConfig) -> Extraction:
    """Read one completion with tags. Tags are literal: `<answer>`.

    strict    exactly one reasoning block, then exactly one answer block, neither blank, only whitespace around them. Without a
              reasoning tag any text before the answer block is the reasoning
    answer    the trimmed text of the only answer block outside of the reasoning. Several, nested or stuffed blocks give none: no
              block wins, so repeating tags gains nothing
    lenient   the last answer block wherever it stands, closed or not; without any, the last number in the last 2,000 characters
              after the reasoning
    """
    order = completion.tags.in_order
    counts = [text.count(tag) for tag in order]
    first = [text.find(tag) for tag in order]
    if len(order) == 4:
        reasoning = _between(text, order[0], order[1]) if counts[:2] == [1, 1] else None
    else:
        reasoning = text[: first[0]] if counts == [1, 1] else None
    block, untagged = _last_block(text, order), text
    closed = text.rfind(order[1]) if len(order) == 4 else -1
    lenient = last_number(text[closed + len(order[1]) :] if closed >= 0 else text) if block is None else block.strip()
    for tag in order if block is None else ():
        untagged = untagged.replace(tag, "")
    # Each text is tested for blankness once, the most expensive test here.
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
        lenient_answer=None if blank_answer else lenient,
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
    if len(order) == 4:
        opening, closing, start = order[0], order[1], text.find(order[2])
        if text.rfind(opening, 0, start) > text.rfind(closing, 0, start):
            return None
        # The next reasoning tag after the answer closes a block: the answer stands inside it, even without an opening tag.
        next_closing, next_opening = text.find(closing, start), text.find(opening, start)
        if next_closing >= 0 and not 0 <= next_opening < next_closing:
            return None
    return found.strip()


def _last_block(text: str, order: list[str]) -> str | None:
    start = text.rfind(order[-2])
    if start < 0:
        return None
    start += len(order[-2])
    ends = [end for tag in order if (end := text.find(tag, start)) >= 0]
    return text[start : min(ends, default=len(text))]


def read_free_text(text: str, _: CompletionConfig) -> Extraction:
    """Free text keeps its format unless it is blank."""
    blank = is_blank(text)
    return Extraction(answer=None, strict_format=not blank, lenient_answer=None, empty_answer=blank)


def read_boxed(text: str, _: CompletionConfig) -> Extraction:
    """The format is kept when the last box is closed (braces balanced; `\\{` and `\\}` do not count) and not blank.

    Only the last box counts, so several gain nothing. The lenient answer is the same, or the last number where there is no box.
    """
    start = text.rfind(BOX)
    end = _closing_brace(text, start + len(BOX)) if start >= 0 else -1
    content = text[start + len(BOX) : end] if end >= 0 else None
    blank = is_blank(text if content is None else content)
    answer = None if blank or content is None else content.strip()
    return Extraction(
        answer=answer,
        strict_format=answer is not None,
        lenient_answer=answer if start >= 0 else last_number(text),
        empty_answer=blank,
        reasoning=text[:start] if answer is not None else None,
        # The box may stand inside a formula: $\boxed{42}$.
        trailing_chars=len(text[end + 1 :].strip().strip("$.").strip()) if answer is not None else 0,
    )


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one before `start`; -1 when none does."""
    depth, index = 1, start
    while index < len(text):
        letter = text[index]
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return index
        index += 2 if letter == "\\" else 1
    return -1


FORMATS: dict[str, Format] = {
    "tags": Format(
        read_tags,
        write=lambda answer, reasoning, completion: iter([completion.tags.block(reasoning, answer)]),
        empty=lambda completion: {"bare_tags": "".join(completion.tags.in_order)},
    ),
    "json": Format(read_object, write_object, empty=lambda _: {"empty_answer": "{}"}, check=check_schema),
    "regex": Format(read_pattern, write_pattern, check=check_pattern),
    "boxed": Format(
        read_boxed,
        write=lambda answer, reasoning, _: iter([f"{reasoning} {BOX}{answer}}}"]),
        empty=lambda _: {"empty_answer": f"{BOX}}}"},
    ),
    "none": Format(read_free_text),
}
"""The formats by their names in the configuration."""
