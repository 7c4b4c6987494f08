"""JSON lines (and JSON arrays) -> records. A broken line becomes a record with a fault; reading continues with the next line.

Memory stays bounded: a line above MAX_LINE_BYTES is skipped without being kept. Only a file that cannot be text is an error.
A file in another encoding than UTF-8 is read through a temporary copy in UTF-8, with the same lines under the same numbers.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson

from grpo_tasks.content.places import holds_array
from grpo_tasks.data.records import Fault, Record, short_json, shorten
from schemas.errors import DataError

MAX_LINE_BYTES = 4 * 2**20
SPAN_BYTES = 4 * 2**20
UTF8 = ("utf-8", "utf-8-sig")
_BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe\0\0": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_MAGIC_BYTES = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"PAR1": "Parquet"}
_EXACT_FLOAT = 2.0**53
"""A float64 represents every integer below this one exactly."""
_BACKSLASH, _COLON = b"\\:"  # as integers: searching bytes for an integer takes a tenth of the time


def read_jsonl(path: Path, *, answer_column: str, encoding: str = "utf-8") -> Iterator[Record]:
    """Records of a JSONL file by line number, or of a JSON array (`.json`) by position.

    `DataError` where the file begins like an archive or Parquet, or is not in this encoding, or a JSON array is broken.
    """
    with open_as_utf8(path, encoding) as file:
        refuse_other_format(path, file)
        if holds_array(path, file):
            try:
                array = orjson.loads(file.read().lstrip())
            except orjson.JSONDecodeError as error:
                raise DataError(
                    f"the JSON array is invalid: {error}",
                    place=f"{path}:{error.lineno}",
                    fix="fix it, or write one object per line as .jsonl",
                ) from error
            yield from (_record(number, value) for number, value in enumerate(array, 1))
            return
        yield from _records(_lines(file), answer_column)


def encoding_of(path: Path) -> str:
    """The encoding that the byte order mark of a file tells: utf-8-sig, utf-16 or utf-32; without one utf-8."""
    with path.open("rb") as file:
        start = file.read(4)
    return next((name for mark, name in _BYTE_ORDER_MARKS.items() if start.startswith(mark)), "utf-8")


@contextmanager
def open_as_utf8(path: Path, encoding: str) -> Iterator[BinaryIO]:
    """The bytes of a text file in UTF-8; raises `DataError` when the file is not in this encoding."""
    if encoding in UTF8:
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as copy:
        with path.open(encoding=encoding, newline="") as text, wrong_encoding(path, encoding):
            while block := text.read(SPAN_BYTES):
                copy.write(block.encode(errors="backslashreplace"))
        copy.seek(0)
        yield copy


@contextmanager
def wrong_encoding(path: Path, encoding: str) -> Iterator[None]:
    """Turn bytes that an encoding does not have into a `DataError`."""
    try:
        yield
    except UnicodeError as error:
        raise DataError(
            f"the file is not {encoding} text: {error}",
            place=str(path),
            fix="set the source's encoding, or remove the setting to have it found out",
        ) from error


class Span(NamedTuple):
    """A range of complete lines of a file."""

    start: int  # offset of the first byte
    end: int  # offset after the last
    line: int  # number of the first line, from 1


def line_spans(path: Path) -> Iterator[Span]:
    """Cut a JSONL file at line ends into spans of about SPAN_BYTES; raises as `read_jsonl` does."""
    with path.open("rb") as file:
        refuse_other_format(path, file)
        start = end = file.tell()
        line = next_line = 1
        while block := file.read(SPAN_BYTES):
            cut = block.rfind(b"\n") + 1
            # A line longer than a block has no end in it; the span then grows by the next block.
            if cut:
                next_line += block.count(b"\n")
                yield Span(start, end + cut, line)
                start, line = end + cut, next_line
            end += len(block)
        if start < end:
            yield Span(start, end, line)


def read_span(path: Path, span: Span, *, answer_column: str) -> Iterator[Record]:
    """Records of one span."""
    with path.open("rb") as file:
        file.seek(span.start)
        yield from _records(_lines(file, span.line, span.end - span.start), answer_column)


def refuse_other_format(path: Path, file: BinaryIO) -> None:
    """Raise `DataError` when the magic bytes are those of another format; leaves the file after a UTF-8 BOM, if any."""
    start = file.read(4)
    for magic, kind in _MAGIC_BYTES.items():
        if start.startswith(magic):
            fix = "unpack it, or let its name end in .gz or .zst" if kind in ("gzip", "zstd") else "unpack it, or set its format"
            raise DataError(f"the file is {kind}, not text", place=str(path), fix=fix)
    file.seek(3 if start.startswith(b"\xef\xbb\xbf") else 0)


def parse_line(line: int, raw: bytes, *, answer_column: str) -> Record:
    """One line of JSON."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        shown = shorten(raw.decode(errors="backslashreplace").strip())
        try:
            raw.decode()
        except UnicodeDecodeError as invalid:
            return Record(line, None, (Fault("encoding", f"byte {raw[invalid.start]:#04x} at {invalid.start}: {shown}"),))
        return Record(line, None, (Fault("unreadable_line", f"{error.msg}: {shown}"),))
    if not isinstance(value, dict):
        return _record(line, value)
    faults = _duplicate_keys(raw) if _may_repeat_a_key(raw, value) else ()
    answer = value.get(answer_column)
    if isinstance(answer, float) and abs(answer) >= _EXACT_FLOAT:
        value[answer_column] = json.loads(raw).get(answer_column)  # orjson rounds integers beyond 64 bits
    return Record(line, value, faults)


def _record(line: int, value: object) -> Record:
    if isinstance(value, dict):
        return Record(line, value)
    return Record(line, None, (Fault("not_an_object", short_json(value)),))


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


def _may_repeat_a_key(raw: bytes, value: dict[str, object]) -> bool:
    # A certain answer costs ten times the parsing, so colons are counted first. The line has one for every key, duplicates
    # included, and those inside its strings. The parsed value, serialised again, has one for every distinct key, and the same
    # strings. Escaped colons would make the counts differ, so such lines are always checked.
    if _BACKSLASH in raw and b"\\u003a" in raw.lower():
        return True
    try:
        return raw.count(_COLON) != orjson.dumps(value).count(_COLON)
    except TypeError:
        return True


def _duplicate_keys(raw: bytes) -> tuple[Fault, ...]:
    duplicates: list[str] = []

    def collect(pairs: list[tuple[str, object]]) -> dict[str, object]:
        distinct = dict(pairs)
        if len(distinct) < len(pairs):
            keys = [key for key, _ in pairs]
            duplicates.extend(key for key in distinct if keys.count(key) > 1)
        return distinct

    try:
        json.loads(raw, object_pairs_hook=collect)
    except RecursionError:
        return (Fault("unreadable_line", "nested too deeply"),)
    return (Fault("duplicate_key", shorten(", ".join(duplicates))),) if duplicates else ()
