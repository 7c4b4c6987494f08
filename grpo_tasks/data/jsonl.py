"""JSON lines (and JSON arrays) -> records; a broken line is a record with a fault, and the next line is read as if nothing was.

Memory stays bounded: a line above MAX_LINE_BYTES is skipped without being kept. Only a file that cannot be text is an error.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson

from grpo_tasks.data.records import Record, show
from grpo_tasks.data.rules import Fault, shorten
from schemas.errors import DataError

MAX_LINE_BYTES = 4 * 2**20
_FOREIGN_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"PAR1": "Parquet"}
_EXACT_FLOAT = 2.0**53


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
        for line, raw in _lines(file):
            if raw is None:
                yield Record(line, None, (Fault("line_too_long", f"more than {MAX_LINE_BYTES:,} bytes"),))
            elif raw.strip():
                yield parse_line(line, raw, answer_column=answer_column)


def refuse_foreign(path: Path, file: BinaryIO) -> None:
    """Raise `DataError` for a file that begins with the mark of another format; leaves the file after a UTF-8 BOM, if any."""
    start = file.read(4)
    for mark, kind in _FOREIGN_MARKS.items():
        if start.startswith(mark):
            mend = f"iconv -f {kind} -t UTF-8" if kind.startswith("UTF") else "unpack it, or set the source's format"
            raise DataError(f"the file is {kind}, not UTF-8 text", place=str(path), mend=mend)
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
            mend="mend it, or write one object per line as .jsonl",
        ) from error
    return array


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    line = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        line += 1
        if len(raw) <= MAX_LINE_BYTES:
            yield line, raw
            continue
        while raw and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES)
        yield line, None


def _why(raw: bytes, error: orjson.JSONDecodeError) -> Fault:
    shown = shorten(raw.decode(errors="backslashreplace").strip())
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        return Fault("encoding", f"byte {raw[wrong.start]:#04x} at {wrong.start}: {shown}")
    return Fault("unreadable_line", f"{error.msg}: {shown}")


def _maybe_doubled(raw: bytes, value: dict[str, object]) -> bool:
    # Looking for certain costs ten times the parsing. A line has as many `":` as its value written anew; more when a key is
    # doubled (or blanks and escapes stand in odd places, which the closer look sorts out).
    if b'" :' in raw or b'"\t:' in raw:
        return True
    try:
        return raw.count(b'":') != orjson.dumps(value).count(b'":')
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
