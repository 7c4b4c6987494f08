"""Format `regex`: the answer is the first group of the last match of a pattern.

The format is kept when the pattern matches and the group is not blank. The engine is RE2 (in pyarrow): one match is linear in the
text, listing all may take its square, so only the last SEARCHED_CHARS characters are searched.

To write a completion, a pattern is inverted in the simplest way: the first alternative, the fewest repetitions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from grpo_tasks.answers.extraction import Extraction, is_blank, last_number
from schemas.config.completion import CompletionConfig
from schemas.errors import ConfigError

SEARCHED_CHARS = 20_000
"""Characters at the end of a completion in which the pattern is searched."""
# Private characters that mark each match in the text. They are removed from the completion first.
_OPENED, _CLOSED = "\ue000", "\ue001"

_ESCAPES = {"s": " ", "d": "1", "w": "a", "n": "\n", "t": "\t", "S": "x", "D": "x", "W": " "}
_NOTHING = frozenset("bBAzZ")
"""Escapes that match at a place and take no text."""


def read_pattern(text: str, completion: CompletionConfig) -> Extraction:
    """Read one completion by the last match of its pattern."""
    searched = text[-SEARCHED_CHARS:].replace(_OPENED, "").replace(_CLOSED, "").encode(errors="replace").decode()
    before, opened, rest = _marked(searched, completion.pattern or "").rpartition(_OPENED)
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


def check_pattern(completion: CompletionConfig) -> None:
    """ConfigError unless the pattern is a linear-time regular expression with a group."""
    try:
        _marked("", completion.pattern or "")
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0].removeprefix("Invalid regular expression: ")
        if "replacement" in reason:
            reason = "it has no group that captures the answer"
        raise ConfigError(
            f"the pattern cannot be used: {reason}",
            place=f"completion.pattern: {completion.pattern}",
            fix="for example '#### (.+)'; RE2 syntax: no look-around, no back-references",
        ) from error


def _marked(text: str, pattern: str) -> str:
    """The text with each match replaced by its first group between marks."""
    marked = pc.replace_substring_regex(pa.array([text]), pattern=pattern, replacement=f"{_OPENED}\\1{_CLOSED}")
    return str(marked[0].as_py())


def write_pattern(answer: str, reasoning: str, completion: CompletionConfig) -> Iterator[str]:
    """Texts that probably match, with the answer in the place of the first group; none for a pattern beyond these means."""
    pattern = completion.pattern or ""
    reader = _Reader(pattern, answer)
    try:
        made = reader.alternatives()
    except (IndexError, ValueError):
        return
    if reader.used and reader.index == len(pattern):
        yield from (f"{reasoning}\n{made}", made)


@dataclass(slots=True)
class _Reader:
    pattern: str
    answer: str
    index: int = 0
    used: bool = False
    """Whether the first group was met; groups after it are read for their text."""

    def alternatives(self) -> str:
        """The text of the alternatives up to the closing bracket or the end: that of the first one."""
        text = self._sequence()
        while self._peek() == "|":
            self.index += 1
            self._sequence()
        return text

    def _sequence(self) -> str:
        pieces = []
        while self._peek() not in ("", "|", ")"):
            start = self.used
            piece = self._atom()
            least = self._least()
            # The group of the answer stays even where it may be left out.
            pieces.append(piece * (max(least, 1) if self.used and not start else least))
        return "".join(pieces)

    def _peek(self) -> str:
        return self.pattern[self.index : self.index + 1]

    def _take(self) -> str:
        letter = self.pattern[self.index]
        self.index += 1
        return letter

    def _atom(self) -> str:
        letter = self._take()
        if letter == "(":
            return self._group()
        if letter == "[":
            return self._one_of()
        if letter == "\\":
            escaped = self._take()
            return "" if escaped in _NOTHING else _ESCAPES.get(escaped, escaped)
        return {"^": "", "$": "", ".": "x"}.get(letter, letter)

    def _group(self) -> str:
        if self._peek() == "?" and self.pattern[self.index + 1] not in "P<":
            # (?i) sets flags; (?i:...) and (?:...) group without capturing.
            while self._take() not in ":)":
                pass
            if self.pattern[self.index - 1] == ")":
                return ""
            captures = False
        else:
            if self._peek() == "?":
                self.index = self.pattern.index(">", self.index) + 1
            captures = not self.used
            self.used = True
        text = self.alternatives()
        if self._take() != ")":
            raise ValueError("an open group")
        return self.answer if captures else text

    def _one_of(self) -> str:
        if self._peek() == "^":
            end = self.pattern.index("]", self.index + 2)
            excluded, self.index = self.pattern[self.index : end], end + 1
            return next(letter for letter in "x1 -" if letter not in excluded)
        letter = self._take()
        escaped = self._take() if letter == "\\" else ""
        self.index = self.pattern.index("]", self.index) + 1
        return _ESCAPES.get(escaped, escaped) if escaped else letter

    def _least(self) -> int:
        mark = self._peek()
        if mark not in {"*", "+", "?", "{"}:
            return 1
        self.index += 1
        least = {"*": 0, "?": 0, "+": 1}.get(mark, 1)
        if mark == "{":
            end = self.pattern.index("}", self.index)
            least = min(int(self.pattern[self.index : end].split(",")[0]), 1_000)
            self.index = end + 1
        if self._peek() == "?":
            self.index += 1
        return least
