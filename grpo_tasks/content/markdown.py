"""Markdown whose cells and blocks may hold any text, untrusted text included: `table(["source"], [[code("a|b.jsonl")]])`."""

import re
from collections.abc import Collection, Iterable, Sequence

from schemas.results.base import Section


class Code(str):
    """A cell that is a code span already: HTML inside it is text to every Markdown renderer."""

    __slots__ = ()


def code(text: str) -> Code:
    """Untrusted text as a code span on one line, so that no markup inside it takes effect; (blank) for empty text."""
    # A backtick would end the span.
    line = " ".join(text.split()).replace("`", "'")
    return Code(f"`{line}`" if line else "(blank)")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> str:
    """A Markdown table, without a final newline; the columns headed `right` are aligned right (numbers).

    Line breaks, pipes and `<` in cells are escaped. `code()` also disables emphasis, links and images.
    """
    rule = "|".join("---:" if column in right else "---" for column in columns)
    first, *others = (f"| {' | '.join(map(_cell, cells))} |" for cells in (columns, *rows))
    return "\n".join([first, f"|{rule}|", *others])


def as_markdown(sections: Iterable[Section]) -> str:
    """Sections below each other. Texts may hold Markdown, quotes anything."""
    parts: list[str] = []
    for section in sections:
        parts += [f"## {section.title}" if section.title else "", section.text]
        parts.append(table(section.columns, section.rows, right=section.right) if section.columns else "")
        parts += [f"{name}:\n\n{block(text)}" for name, text in section.quotes.items()]
    return "\n\n".join(filter(None, parts)) + "\n"


def block(text: str) -> str:
    """Untrusted text of several lines: an indented block shows any text as it is, with its fences, HTML and headings."""
    return "\n".join("    " + line for line in text.splitlines()) or "    (empty)"


def _cell(text: str) -> str:
    # Renderers count the backslashes before a pipe: an even number of them would end the cell.
    line = re.sub(r"(\\*)\|", r"\1\1\\|", " ".join(text.split()))
    # Inside a code span an entity would be shown as it is written.
    return line if isinstance(text, Code) else line.replace("<", "&lt;")
