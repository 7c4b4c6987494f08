"""JSON lines (and JSON arrays) -> records; a broken line is a record with a fault, and the next line is read as if nothing was.

Memory stays bounded: a line above MAX_LINE_BYTES is skipped without being kept. Only a file that cannot be text is an error.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson

from grpo_tasks.data.records import Record, show
from grpo_tasks.data.rules import Fault, shorten
from schemas.errors import DataError

MAX_LINE_BYTES = 4 * 2**20
SPAN_BYTES = 4 * 2**20
_FOREIGN_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"PAR1": "Parquet"}
_EXACT_FLOAT = 2.0**53
_BACKSLASH, _COLON = b"\\:"  # as numbers: looked for in a tenth of the time


def read_jsonl(path: Path, *, answer_column: str) -> Iterator[Record]:
    """Records of a JSONL file by line number, or of a JSON array (`.json`) by position.

    Raises:
        DataError: the file begins like UTF-16, an archive or Parquet; a JSON array is broken.
    """
    with path.open("rb") as file:
        refuse_foreign(path, file)
        if path.suffix == ".json" and (array := _array(path)) is not None:
            yield from (_record(number, value) for number, value in enumerate(array, 1))
            return
        yield from _records(_lines(file), answer_column)


class Span(NamedTuple):
    """Some whole lines of a file."""

    start: int
    """Offset of the first byte."""
    end: int
    """Offset after the last."""
    line: int
    """Number of the first line, from 1."""


def line_spans(path: Path) -> Iterator[Span]:
    """The lines of a JSONL file in spans of about SPAN_BYTES, which may be read apart; raises as `read_jsonl` does."""
    with path.open("rb") as file:
        refuse_foreign(path, file)
        start = end = file.tell()
        line = next_line = 1
        while block := file.read(SPAN_BYTES):
            cut = block.rfind(b"\n") + 1
            if cut:
                next_line += block.count(b"\n")
                yield Span(start, end + cut, line)
                start, line = end + cut, next_line
            end += len(block)
        if start < end:
            yield Span(start, end, line)


def read_span(path: Path, span: Span, *, answer_column: str) -> Iterator[Record]:
    """Records of some lines of a JSONL file, by line number."""
    with path.open("rb") as file:
        file.seek(span.start)
        yield from _records(_lines(file, span.line, span.end - span.start), answer_column)


def refuse_foreign(path: Path, file: BinaryIO) -> None:
    """Raise `DataError` for a file that begins with the mark of another format; leaves the file after a UTF-8 BOM, if any."""
    start = file.read(4)
    for mark, kind in _FOREIGN_MARKS.items():
        if start.startswith(mark):
            fix = f"iconv -f {kind} -t UTF-8" if kind.startswith("UTF") else "unpack it, or set the source's format"
            raise DataError(f"the file is {kind}, not UTF-8 text", place=str(path), fix=fix)
    file.seek(3 if start.startswith(b"\xef\xbb\xbf") else 0)


def parse_line(line: int, raw: bytes, *, answer_column: str) -> Record:
    """One line of JSON as a record."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return Record(line, None, (_why(raw, error),))
    if not isinstance(value, dict):
        return _record(line, value)
    faults: tuple[Fault, ...] = ()
    if _maybe_doubled(raw, value):
        faults = _doubled_keys(raw)
    answer = value.get(answer_column)
    if isinstance(answer, float) and abs(answer) >= _EXACT_FLOAT:
        value[answer_column] = json.loads(raw).get(answer_column)  # orjson rounds integers beyond 64 bits
    return Record(line, value, faults)


def _record(line: int, value: object) -> Record:
    if isinstance(value, dict):
        return Record(line, value)
    return Record(line, None, (Fault("not_an_object", show(value)),))


def _array(path: Path) -> list[object] | None:
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text.startswith(b"["):
        return None
    try:
        array: list[object] = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DataError(
            f"the JSON array is broken: {error}",
            place=f"{path}:{error.lineno}",
            fix="fix it, or write one object per line as .jsonl",
        ) from error
    return array


def _records(lines: Iterator[tuple[int, bytes | None]], answer_column: str) -> Iterator[Record]:
    for line, raw in lines:
        if raw is None:
            yield Record(line, None, (Fault("line_too_long", f"more than {MAX_LINE_BYTES:,} bytes"),))
        elif raw.strip():
            yield parse_line(line, raw, answer_column=answer_column)


def _lines(file: BinaryIO, line: int = 1, num_bytes: float = math.inf) -> Iterator[tuple[int, bytes | None]]:
    while num_bytes > 0 and (raw := file.readline(MAX_LINE_BYTES + 1)):
        num_bytes -= len(raw)
        if len(raw) <= MAX_LINE_BYTES:
            yield line, raw
        else:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE_BYTES)
                num_bytes -= len(raw)
            yield line, None
        line += 1


def _why(raw: bytes, error: orjson.JSONDecodeError) -> Fault:
    shown = shorten(raw.decode(errors="backslashreplace").strip())
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        return Fault("encoding", f"byte {raw[wrong.start]:#04x} at {wrong.start}: {shown}")
    return Fault("unreadable_line", f"{error.msg}: {shown}")


def _maybe_doubled(raw: bytes, value: dict[str, object]) -> bool:
    # Looking for certain costs ten times the parsing. A line has a colon for every key, the doubled ones too, and those of its
    # texts; its value written anew has one for every key that is left, and the same texts. Escaped colons would blur that.
    if _BACKSLASH in raw and b"\\u003a" in raw.lower():
        return True
    try:
        return raw.count(_COLON) != orjson.dumps(value).count(_COLON)
    except TypeError:
        return True


def _doubled_keys(raw: bytes) -> tuple[Fault, ...]:
    doubled: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> dict[str, object]:
        together = dict(pairs)
        if len(together) < len(pairs):
            keys = [key for key, _ in pairs]
            doubled.extend(key for key in together if keys.count(key) > 1)
        return together

    try:
        json.loads(raw, object_pairs_hook=note)
    except RecursionError:
        return (Fault("unreadable_line", "nested too deeply"),)
    return (Fault("duplicate_key", shorten(", ".join(doubled))),) if doubled else ()
