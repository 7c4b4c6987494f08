r"""A text that a pattern of the format `regex` matches, around a given answer: `(?i)answer:\s*(\d+)` and 42 -> `answer:42`.

Literals, escapes, character classes, groups, alternatives and repetitions are inverted, each in the simplest way: the first
alternative, the least repetitions. The caller checks whether the pattern really matches.
"""

from dataclasses import dataclass

_ESCAPES = {"s": " ", "d": "1", "w": "a", "n": "\n", "t": "\t", "S": "x", "D": "x", "W": " "}
_NOTHING = frozenset("bBAzZ")
"""Escapes that match at a place and take no text."""


def text_matching(pattern: str, answer: str) -> str | None:
    """A text that probably matches, with the answer in the place of the first group; None for a pattern beyond these means."""
    try:
        reader = _Reader(pattern, answer)
        text = reader.alternatives()
    except (IndexError, ValueError):
        return None
    return text if reader.used and reader.index == len(pattern) else None


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
        if mark not in ("*", "+", "?", "{") or not mark:
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
