"""How the command line prints: lines, tables, sections of a result."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from schemas.results.base import Section

out = Console()
"""Standard output of every command."""


def say(*lines: str) -> None:
    """Print lines as they are, neither wrapped nor coloured nor read as markup."""
    for line in lines:
        out.print(line, soft_wrap=True, markup=False, highlight=False)


def table_of(
    headings: Iterable[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str | None = None,
    right: Sequence[str] = (),
    fold: bool = False,
) -> Table:
    """A table of plain texts. Columns in `right` are aligned there; with `fold` a long cell is wrapped instead of cut."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold" if fold else "ellipsis")
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def print_table(table: Table, figures: Sequence[str] = ()) -> None:
    """Print a table without cutting a cell: a program that reads it, such as grep, gets whole rows and all columns.

    On a terminal that is too narrow, the last of `figures` (headings) are left out until the rest fits, and named below.
    """
    left_out: list[str] = []
    wide = out.options.update(width=10_000)
    while (width := Measurement.get(out, wide, table).maximum) > out.width and out.is_terminal and len(left_out) < len(figures):
        left_out.insert(0, figures[-1 - len(left_out)])
        table.columns = [column for column in table.columns if column.header != left_out[0]]
    (out if out.is_terminal else Console(width=max(out.width, width))).print(table)
    if left_out:
        say(f"a wider terminal, or | cat, also shows: {', '.join(left_out)}")


def show_sections(sections: Sequence[Section], *, title: str | None = None) -> None:
    """Print sections of a result; `title` stands above each table."""
    for section in sections:
        say(*filter(None, [section.title, section.text]))
        if section.columns:
            out.print(table_of(section.columns, section.rows, right=section.right, title=title))
        say(*(f"{name}:\n{quote}" for name, quote in section.quotes.items()))
