"""CSV -> records. Cells may hold line breaks; a record's line is the one it begins on. Cells stay text, nothing is guessed."""

import csv
from collections.abc import Iterator
from pathlib import Path

from grpo_tasks.data.jsonl import MAX_LINE_BYTES, refuse_foreign
from grpo_tasks.data.records import Record, show
from grpo_tasks.data.rules import Fault, shorten
from schemas.errors import DataError

_SURROGATES = "surrogateescape"


def read_csv(path: Path) -> Iterator[Record]:
    """Records of a comma-separated file with a header line.

    Raises:
        DataError: no header, a column named twice, the file is UTF-16 or an archive, a quote that is never closed.
    """
    with path.open("rb") as probe:
        refuse_foreign(path, probe)
    csv.field_size_limit(MAX_LINE_BYTES)
    # Bytes that are no UTF-8 must not end the reading: they come through as surrogates and are refused row by row.
    with path.open(encoding="utf-8-sig", errors=_SURROGATES, newline="") as file:
        reader = csv.reader(file, strict=True)
        header = next(reader, None)
        if header is None:
            raise DataError("the file is empty", place=str(path), fix="give it a header line and rows")
        _check_header(header, path)
        begins = reader.line_num + 1
        while (cells := _next(reader, path, begins)) is not None:
            if cells:
                yield _record(begins, header, cells) if isinstance(cells, list) else Record(begins, None, (cells,))
            begins = reader.line_num + 1


def _next(reader: Iterator[list[str]], path: Path, begins: int) -> list[str] | Fault | None:
    try:
        return next(reader, None)
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise DataError(
                "a quote is opened and never closed, so the rest of the file is one cell",
                place=f"{path}:{begins}",
                fix="close the quote, or double it inside a quoted cell",
            ) from error
        return Fault("line_too_long" if "field limit" in str(error) else "unreadable_line", str(error))


def _record(line: int, header: list[str], cells: list[str]) -> Record:
    if len(cells) != len(header):
        return Record(line, None, (Fault("cell_count", f"{len(cells)} cells instead of {len(header)}: {show(cells)}"),))
    text = "".join(cells)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as wrong:
            shown = shorten(text.encode(errors=_SURROGATES).decode(errors="backslashreplace"))
            return Record(line, None, (Fault("encoding", f"byte {ord(text[wrong.start]) - 0xDC00:#04x}: {shown}"),))
    return Record(line, {key: cell if cell else None for key, cell in zip(header, cells, strict=True)})


def _check_header(header: list[str], path: Path) -> None:
    twice = [name for name in header if header.count(name) > 1]
    if twice:
        raise DataError(f"column {twice[0]!r} stands twice in the header", place=f"{path}:1", fix="rename one")
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and mark in header[0]:
            raise DataError(f"the cells are separated by {name}, not commas", place=f"{path}:1", fix="save it with commas")
