"""How the command line prints: lines, and sections of a result with their tables.

A table fits the terminal. Where its columns do not, those that matter least are left out and named; `--wide` prints all of them.
A pipe gets all columns as lines of tab-separated cells, which grep, cut and a spreadsheet can read.
"""

import textwrap
from collections.abc import Sequence

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from schemas.results.base import Section

out = Console()
"""Standard output of every command."""
_GAP = 2  # blanks between two columns
_HEADING = 5
"""Least width of a heading that is longer: `25 to 50 %` becomes two lines, not four."""


def say(*lines: str) -> None:
    """Print lines as they are, neither wrapped nor coloured nor read as markup."""
    for line in lines:
        out.print(line, soft_wrap=True, markup=False, highlight=False)


def tell(*lines: str) -> None:
    """Print sentences: in a terminal broken between words, further lines below the first one's text; elsewhere a line each."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        # A path that is longer than the line stays whole: it is to be copied.
        how = textwrap.TextWrapper(out.width - 1, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
        say(how.fill(line) if out.is_terminal and line else line)


def hint(*lines: str) -> None:
    """Print what the reader may want next, in a terminal only: a program that reads the output gets the result alone."""
    if out.is_terminal:
        say(*lines)


def pipe_row(cells: Sequence[str]) -> None:
    """Print a row for a program: its cells with tabs between them, which rich would expand."""
    typer.echo("\t".join(" ".join(cell.split()) for cell in cells))


def show(*sections: Section, wide: bool = False) -> None:
    """Print sections of a result; `wide` prints every column of a table on a terminal that is too narrow for them."""
    for section in sections:
        for line in filter(None, [section.title, section.text]):
            out.print(line, soft_wrap=not out.is_terminal, markup=False, highlight=False)
        if section.rows and out.is_terminal:
            _show_table(section, wide=wide)
        elif section.rows:
            for row in (section.columns, *section.rows):
                pipe_row(row)
        say(*(f"{name}:\n{quote}" for name, quote in section.quotes.items()))


def _show_table(section: Section, *, wide: bool) -> None:
    columns, cells = list(section.columns), list(zip(*section.rows, strict=True))
    # A heading may be broken between its words; a cell only where all columns together are too wide.
    lines = [[*name.split(), name[:_HEADING], *"\n".join(of).splitlines()] for name, of in zip(columns, cells, strict=True)]
    widths = [max(map(cell_len, texts)) for texts in lines]
    shown = [number for number, name in enumerate(columns) if name not in section.extra or any(cells[number])]
    optional = [number for name in section.extra for number in shown if columns[number] == name]

    def total() -> int:
        return sum(widths[number] for number in shown) + _GAP * (len(shown) - 1)

    left_out: list[str] = []
    while optional and not wide and total() > out.width:
        shown.remove(last := optional.pop())
        left_out.insert(0, columns[last])
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    fits = wide or total() <= out.width
    for number in shown:
        name, width = columns[number], widths[number] if fits else None
        # Without a width, the widest columns are narrowed and their cells folded; none is cut.
        table.add_column(escape(name), justify="right" if name in section.right else "left", overflow="fold", width=width)
    for row in section.rows:
        table.add_row(*(escape(row[number]) for number in shown))
    (Console(width=max(out.width, total())) if wide else out).print(table)
    if left_out:
        out.print(f"not shown: {', '.join(left_out)} (--wide, or | cat)", markup=False, highlight=False)
