"""The formats of completions: which text is the answer. Rewards, evaluation and the lab share this one definition.

    completion.format   what is read                                          where
    tags                <answer>...</answer>, after <reasoning>...</reasoning>  tags.py
    json                the value of a key of a JSON object                   objects.py
    regex               a group of the last match of a pattern                patterns.py
    boxed               the last \\boxed{...}                                  `read_boxed`
    none                free text: no answer                                  `read_free_text`

A new format is its name and its settings in schemas/config/completion.py, and a `Format` here.

An empty answer never earns anything. Blank text (only whitespace, control, format and filler characters) is never extracted and
equals nothing, and every built-in reward gives its lowest score when `Extraction.worthless` is set.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_tasks.answers.extraction import Extraction, is_blank, last_number
from grpo_tasks.answers.objects import check_schema, read_object, write_object
from grpo_tasks.answers.patterns import check_pattern, read_pattern, write_pattern
from grpo_tasks.answers.tags import read_tags, write_tags
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
    """Read one completion in the format of the configuration. Never raises, whatever the text."""
    return FORMATS[completion.format].read(text, completion)


def check_completion(completion: CompletionConfig) -> None:
    """Raise `ConfigError` for a pattern or a JSON Schema that cannot be used."""
    FORMATS[completion.format].check(completion)


def perfect_completion(
    answer: str | None, completion: CompletionConfig, *, reasoning: str = "Working it out step by step."
) -> str | None:
    """A completion from which `extract` reads this answer in the strict format; None when none can be made.

    Args:
        answer: the answer; None for a row without ground truth. Only a JSON object can do without one.
        completion: the format.
        reasoning: text for the place where the format has reasoning. It must not contain the format's own marks.
    """
    answer = None if answer is None else answer.strip()
    if answer is None and completion.has_answer:
        return None
    for text in FORMATS[completion.format].write(answer or "", reasoning, completion):
        found = extract(text, completion)
        if found.strict_format and found.answer == answer:
            return text
    return None


def read_free_text(text: str, _: CompletionConfig) -> Extraction:
    """Text without an answer; it keeps its format unless it is blank."""
    blank = is_blank(text)
    return Extraction(answer=None, strict_format=not blank, lenient_answer=None, empty_answer=blank)


def read_boxed(text: str, _: CompletionConfig) -> Extraction:
    """Read one completion with a box.

    The format is kept by a box whose last one is closed (braces balanced; `\\{` and `\\}` do not count) and not blank. Only the
    last box counts, so several gain nothing. The lenient answer is the same, or the last number where there is no box.
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


def write_boxed(answer: str, reasoning: str, _: CompletionConfig) -> Iterator[str]:
    """The answer in a box behind the reasoning."""
    yield f"{reasoning} {BOX}{answer}}}"


FORMATS: dict[str, Format] = {
    "tags": Format(read_tags, write_tags, empty=lambda completion: {"bare_tags": "".join(completion.tags.in_order)}),
    "json": Format(read_object, write_object, empty=lambda _: {"empty_answer": "{}"}, check=check_schema),
    "regex": Format(read_pattern, write_pattern, check=check_pattern),
    "boxed": Format(read_boxed, write_boxed, empty=lambda _: {"empty_answer": f"{BOX}}}"}),
    "none": Format(read_free_text),
}
"""The formats by their names in the configuration."""
