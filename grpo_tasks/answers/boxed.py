r"""Format `boxed`: the answer is the content of the last `\boxed{...}`, braces balanced (`\{` and `\}` do not count).

The completion keeps the format when it has a box and the last one is closed and not blank. Text may stand around it. Only the
last box counts, so several boxes gain nothing. The lenient answer is the same, or the last number where there is no box.
"""

from grpo_tasks.answers.extraction import Extraction, is_blank, last_number

BOX = "\\boxed{"


def read_boxed(text: str) -> Extraction:
    """Read one completion by the rules of this module, in time linear in its length."""
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
