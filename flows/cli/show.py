"""How the command line prints: lines, and sections of a result with their tables.

A table fits the terminal. Where its columns do not, those that matter least are left out and named; `--wide` prints all of them.
A pipe gets all columns as lines of tab-separated cells, which grep, cut and a spreadsheet can read.
"""

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
    cells = {name: [row[number] for row in section.rows] for number, name in enumerate(section.columns)}
    # A heading may be broken between its words, the line of a cell is as wide as it is.
    lines = {name: [*name.split(), name[:_HEADING], *"\n".join(rows).splitlines()] for name, rows in cells.items()}
    widths = {name: max(map(cell_len, texts)) for name, texts in lines.items()}
    shown = [name for name in section.columns if name not in section.extra or any(cells[name])]
    missing = [name for name in section.extra if name in shown]
    left_out: list[str] = []
    while missing and not wide and _total(widths, shown) > out.width:
        left_out.insert(0, missing.pop())
        shown.remove(left_out[0])
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    fits = wide or _total(widths, shown) <= out.width
    for name in shown:
        side = "right" if name in section.right else "left"
        # Without a width, the widest columns are narrowed and their cells folded; none is cut.
        table.add_column(escape(name), justify=side, overflow="fold", width=widths[name] if fits else None)
    for row in zip(*(cells[name] for name in shown), strict=True):
        table.add_row(*map(escape, row))
    (Console(width=max(out.width, _total(widths, shown))) if wide else out).print(table)
    if left_out:
        out.print(f"not shown: {', '.join(left_out)} (--wide, or | cat)", markup=False, highlight=False)


def _total(widths: dict[str, int], shown: list[str]) -> int:
    return sum(widths[name] for name in shown) + _GAP * (len(shown) - 1)
