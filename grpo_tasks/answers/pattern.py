r"""Format `regex`: the answer is the first group of the last match of `completion.pattern`.

The completion keeps the format when the pattern matches and the group is not blank. Only the last match counts, so several
matches gain nothing. The lenient answer is the same, or the last number where the pattern does not match.

The engine is RE2 (in pyarrow). One match takes time linear in the text, whatever the pattern. Listing all matches can take the
square of it, so only the last SEARCHED_CHARS characters of a longer completion are searched.
"""

import pyarrow as pa
import pyarrow.compute as pc

from grpo_tasks.answers.extraction import Extraction, is_blank, last_number
from schemas.errors import ConfigError

SEARCHED_CHARS = 20_000
"""Characters at the end of a completion in which the pattern is searched."""
# Private characters that mark each match in the text. They are removed from the completion first.
_OPENED, _CLOSED = "\ue000", "\ue001"


def read_pattern(text: str, pattern: str) -> Extraction:
    """Read one completion by the rules of this module."""
    searched = text[-SEARCHED_CHARS:].replace(_OPENED, "").replace(_CLOSED, "").encode(errors="replace").decode()
    before, opened, rest = _marked(searched, pattern).rpartition(_OPENED)
    content, _, after = rest.partition(_CLOSED)
    blank = is_blank(content if opened else text)
    answer = None if blank or not opened else content.strip()
    return Extraction(
        answer=answer,
        strict_format=answer is not None,
        lenient_answer=answer if opened else last_number(text),
        empty_answer=blank,
        reasoning=before.replace(_OPENED, "").replace(_CLOSED, "") if answer is not None else None,
        trailing_chars=len(after.strip()) if answer is not None else 0,
    )


def check_pattern(pattern: str) -> None:
    """Raise `ConfigError` unless the pattern is a linear-time regular expression with a group."""
    try:
        _marked("", pattern)
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0].removeprefix("Invalid regular expression: ")
        if "replacement" in reason:
            reason = "it has no group that captures the answer"
        raise ConfigError(
            f"the pattern cannot be used: {reason}",
            place=f"completion.pattern: {pattern}",
            fix="for example '#### (.+)'; RE2 syntax: no look-around, no back-references",
        ) from error


def _marked(text: str, pattern: str) -> str:
    """The text with each match replaced by its first group between marks."""
    marked = pc.replace_substring_regex(pa.array([text]), pattern=pattern, replacement=f"{_OPENED}\\1{_CLOSED}")
    return str(marked[0].as_py())
