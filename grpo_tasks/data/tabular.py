"""CSV files, Parquet files and hub data sets -> records.

    CSV      text cells    line on which the record begins
    Parquet  typed values  row number from 1
    hub      typed values  row number from 1

CSV cells stay text: no type is guessed. Delimiter and encoding are found out where the config does not name them. `datasets` is
imported only for hub data.
"""

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_tasks.data.jsonl import MAX_LINE_BYTES, UTF8, encoding_of, refuse_other_format, wrong_encoding
from grpo_tasks.data.records import Fault, Record, short_json, shorten
from schemas.config.data import DataSource
from schemas.errors import DataError

DELIMITERS = (",", ";", "\t", "|")
_BATCH = 4096
_SURROGATES = "surrogateescape"
_BLOCK_BYTES = 2**20
_HEADER_CHARS = 2**16
_UTF8_CHARACTER = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_NOT_CP1252 = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")


def read_csv(path: Path, *, delimiter: str = ",", encoding: str = "utf-8") -> Iterator[Record]:
    """Records of a file of cells with a header line. Cells may contain line breaks.

    Raises:
        DataError: no header, a column named twice, the file is an archive or in another encoding, a quote that is never closed.
    """
    with path.open("rb") as start:
        refuse_other_format(path, start)
    csv.field_size_limit(MAX_LINE_BYTES)
    with _open_text(path, encoding) as file, wrong_encoding(path, encoding):
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = next(reader, None)
        if header is None:
            raise DataError("the file is empty", place=str(path), fix="add a header line and rows")
        _check_header(header, path)
        first_line = reader.line_num + 1
        while (cells := _next_cells(reader, path, first_line)) is not None:
            if cells:  # a blank line has no cells
                yield _record(first_line, header, cells) if isinstance(cells, list) else Record(first_line, None, (cells,))
            first_line = reader.line_num + 1


def csv_encoding(path: Path) -> str:
    """The encoding of a CSV file: that of its byte order mark; cp1252 if no character of it is UTF-8; else utf-8.

    Spreadsheets on Windows write cp1252. A file with valid UTF-8 beside single broken bytes stays UTF-8, and the rows with those
    bytes are refused.
    """
    marked = encoding_of(path)
    if marked != "utf-8":
        return marked
    decoder = codecs.getincrementaldecoder("utf-8")()
    valid = some_utf8 = not_cp1252 = False
    with path.open("rb") as file:
        try:
            while block := file.read(_BLOCK_BYTES):
                decoder.decode(block)
            decoder.decode(b"", final=True)
            valid = True
        except UnicodeDecodeError:
            file.seek(0)
            while (block := file.read(_BLOCK_BYTES)) and not some_utf8:
                some_utf8 = _UTF8_CHARACTER.search(block) is not None
                not_cp1252 = not_cp1252 or _NOT_CP1252.search(block) is not None
    return "utf-8" if valid or some_utf8 or not_cp1252 else "cp1252"


def csv_delimiter(path: Path, encoding: str, wanted: Sequence[str]) -> str:
    """The delimiter by which the header has the most of the wanted columns, then the most columns at all.

    Raises:
        DataError: the file is not in this encoding.
    """
    with _open_text(path, encoding) as file, wrong_encoding(path, encoding):
        start = file.read(_HEADER_CHARS)
    csv.field_size_limit(MAX_LINE_BYTES)

    def columns(mark: str) -> tuple[int, int]:
        header = [name.strip("\ufeff ") for name in next(csv.reader(io.StringIO(start, newline=""), delimiter=mark), [])]
        return len(set(wanted) & set(header)), len(header)

    # The first of several that are equal: a header of one column has no delimiter, and commas are the rule.
    return max(DELIMITERS, key=columns)


def read_parquet(path: Path) -> Iterator[Record]:
    """Records of a Parquet file; raises `DataError` when the file is not Parquet or is damaged."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(number, fields)
    # A damaged page may also decode to text that is not UTF-8, or to a date that Python cannot represent.
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"the file cannot be read as Parquet: {_first_line(error)}",
            place=f"{path}, after row {number}",
            fix="write the file again, or set the source's format",
        ) from error


def read_hub(source: DataSource, path: str) -> Iterator[Record]:
    """Records of one split of a hub data set (or of a local folder in the hub's layout).

    Raises:
        DataError: the data set, its configuration or split is unknown or cannot be reached.
    """
    from datasets import load_dataset

    try:
        # Version 4 and later of datasets run no loading scripts, so no code of the data set is executed.
        dataset = load_dataset(path, source.name, split=source.split, revision=source.revision)
    except Exception as error:  # datasets passes on whatever its readers and the network raise
        raise DataError(
            f"the hub data set cannot be loaded: {type(error).__name__}: {_first_line(error)}",
            place=f"{source.path} (name {source.name}, split {source.split})",
            fix="check the id, data.*.name and data.*.split; a local file needs a suffix (.jsonl, .csv, .parquet)",
        ) from error
    number = 0
    for table in dataset.with_format("arrow").iter(_BATCH):
        for fields in table.to_pylist():
            number += 1
            yield Record(number, fields)


def _open_text(path: Path, encoding: str) -> io.TextIOWrapper:
    # Bytes that are not UTF-8 must not stop the reader: they become surrogates, and _record reports the row.
    errors, encoding = (_SURROGATES, "utf-8-sig") if encoding in UTF8 else ("strict", encoding)
    return path.open(encoding=encoding, errors=errors, newline="")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _next_cells(reader: Iterator[list[str]], path: Path, first_line: int) -> list[str] | Fault | None:
    try:
        return next(reader, None)
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise DataError(
                "a quote is opened and never closed, so the rest of the file is one cell",
                place=f"{path}:{first_line}",
                fix="close the quote, or double it inside a quoted cell",
            ) from error
        return Fault("line_too_long" if "field limit" in str(error) else "unreadable_line", str(error))


def _record(line: int, header: list[str], cells: list[str]) -> Record:
    if len(cells) != len(header):
        found = f"{len(cells)} cells instead of {len(header)}: {short_json(cells)}"
        return Record(line, None, (Fault("cell_count", found),))
    text = "".join(cells)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            shown = shorten(text.encode(errors=_SURROGATES).decode(errors="backslashreplace"))
            # surrogateescape stores byte 0xNN as the code point U+DC00 + 0xNN
            return Record(line, None, (Fault("encoding", f"byte {ord(text[error.start]) - 0xDC00:#04x}: {shown}"),))
    return Record(line, {key: cell if cell else None for key, cell in zip(header, cells, strict=True)})


def _check_header(header: list[str], path: Path) -> None:
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise DataError(f"the header names column {repeated[0]!r} twice", place=f"{path}:1", fix="rename one of them")
