"""Every source of a config -> `rows.parquet` (schemas/tables.py Raw): all rows, the broken ones with their faults.

Streams: memory holds a few chunks of rows, not the file. Validates no row; the only errors are about whole files.
"""

import codecs
import csv
import difflib
import hashlib
import io
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.content.places import Unit, holds_array
from grpo_tasks.content.shards import PACKINGS, format_of, shards_of, unpacked_name
from grpo_tasks.data.chunks import (
    PARALLEL_FROM_BYTES,
    RAW_ARROW,
    Chunk,
    ScanSummary,
    no_garbage_collection,
    num_workers,
    read_chunks,
    read_chunks_in_parallel,
)
from grpo_tasks.data.jsonl import MAX_LINE_BYTES, UTF8, encoding_of, open_as_utf8, read_jsonl, refuse_other_format, wrong_encoding
from grpo_tasks.data.records import OPTIONAL, Columns, Fault, Fields, Record, short_json, shorten
from grpo_tasks.kit.files import replacing
from grpo_tasks.kit.progress import Count
from schemas.config.data import DataConfig, DataSource, template_columns
from schemas.errors import DataError
from schemas.paths import is_local, resolve, why_not_a_file
from schemas.results.data import SourceFile

ROWS = "rows.parquet"

Split = Literal["train", "eval"]

DELIMITERS = (",", ";", "\t", "|")
_BATCH = 4096
_SURROGATES = "surrogateescape"
_BLOCK_BYTES = 2**20
_HEADER_CHARS = 2**16
_UTF8_CHARACTER = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_ARROW_FILE = b"ARROW1"
MAX_GROWTH = 100
"""How many times its size a packed file may unpack to. Text shrinks to a tenth, rarely to a hundredth."""
_UNPACKED_BYTES = 256 * 2**20
"""What any packed file may unpack to."""
_NOT_CP1252 = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")


def load_sources(data: DataConfig, *, directory: Path) -> list[SourceFile]:
    """Read all sources into `directory`/rows.parquet.

    `DataError` where a source is missing, unreadable, empty, or has none of the configured columns; then no file is left behind.
    """
    sources: list[SourceFile] = []
    split: Split
    with (
        replacing(directory / ROWS) as unfinished,
        no_garbage_collection(),
        pq.ParquetWriter(unfinished, RAW_ARROW, compression="lz4") as writer,
    ):
        for split, listed in (("train", data.train), ("eval", data.eval)):
            for source in listed:
                left = source.max_rows
                for shard in shards_of(source):
                    if left is not None and left <= 0:
                        break
                    sources.append(_load(shard.model_copy(update={"max_rows": left}), split, data=data, writer=writer))
                    left = None if left is None else left - sources[-1].rows
    return sources


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a source is to be read."""

    format: str
    encoding: str = ""
    delimiter: str = ""
    unit: Unit = "row"


def _load(source: DataSource, split: Split, *, data: DataConfig, writer: pq.ParquetWriter) -> SourceFile:
    columns = Columns(
        question=data.question_column,
        prompt=data.prompt_column,
        answer=data.answer_column,
        task=None if source.task else data.task_column,
        only_task=source.task or "",
        template=source.question or data.question,
        rename={**data.rename, **source.rename} or None,
    )
    path = Path(resolve(source.path))
    is_hub = _format(source) == "hub"
    before = None if is_hub else _stamp(path)
    summary, rows_digest = ScanSummary(), hashlib.sha256()
    count = Count(f"reading {path.name}", unit="rows")
    with ThreadPoolExecutor(1) as pool, unpacked(path, source) as plain:
        # hashlib releases the interpreter lock, so the file is hashed while it is read.
        file_digest = None if is_hub else pool.submit(file_sha256, path)
        layout = _layout(plain, source, columns)
        for chunk in _chunks(plain, source, split, layout, columns=columns, rows_digest=rows_digest):
            writer.write_table(chunk.table)
            summary.add(chunk.summary)
            count.add(chunk.table.num_rows)
        sha256 = file_digest.result() if file_digest else rows_digest.hexdigest()
    if source.sha256 is not None and (sha256 != source.sha256 or _stamp(path) != before):
        # The key of the run, and of this step, is that of the other contents.
        raise DataError(
            "the file has changed since this run started", place=source.path, fix="start the run again when the file is complete"
        )
    summary.check(source.path, columns)
    return SourceFile(
        path=source.path,
        split=split,
        rows=summary.rows,
        sha256=sha256,
        encoding=layout.encoding,
        delimiter=layout.delimiter,
        unit=layout.unit,
        columns=summary.columns,
        with_answer=summary.with_answer,
        form=summary.form,
        of_form=summary.of_form,
    )


def _stamp(path: Path) -> tuple[int, int, int, int]:
    # It changes with every ordinary write, and when another file takes the name.
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _format(source: DataSource) -> str:
    """The format of one file, which exists then, or hub."""
    path = Path(resolve(source.path))
    file_format = source.format if source.format != "auto" else format_of(path) or "hub"
    if file_format != "hub":
        _check_file(path, source)
    elif source.format == "auto" and is_local(source.path):
        suffix = unpacked_name(path).suffix
        raise DataError(
            f"the suffix {suffix!r} belongs to no known format" if suffix else "the file name has no suffix",
            place=source.path,
            fix="set format: jsonl, csv, parquet, arrow or hub",
        )
    return file_format


def _layout(path: Path, source: DataSource, columns: Columns) -> _Layout:
    file_format = _format(source)
    if file_format in ("hub", "parquet", "arrow"):
        return _Layout(file_format)
    if file_format == "csv":
        encoding = source.encoding or csv_encoding(path)
        wanted = [columns.original(name) for name in (columns.question, columns.prompt, columns.answer, columns.task)]
        named = template_columns(columns.template) if columns.template else []
        wanted += [columns.original(name) for name in {*named, *(name.removesuffix(OPTIONAL) for name in named)}]
        return _Layout("csv", encoding, source.delimiter or csv_delimiter(path, encoding, wanted), "line")
    encoding = source.encoding or encoding_of(path)
    if path.suffix.lower() != ".json":
        return _Layout("jsonl", encoding, unit="line")
    with open_as_utf8(path, encoding) as file:
        return _Layout("jsonl", encoding, unit="record" if holds_array(path, file) else "line")


@contextmanager
def unpacked(path: Path, source: DataSource) -> Iterator[Path]:
    """The file itself, or for a packed one (.gz, .zst) a temporary copy as it was before; errors name the file itself.

    `DataError` where it is damaged, or grows beyond what text does (MAX_GROWTH): a small file may unpack to a full disk.
    """
    codec = PACKINGS.get(path.suffix.lower())
    if codec is None or _format(source) == "hub":
        yield path
        return
    most = max(_UNPACKED_BYTES, MAX_GROWTH * path.stat().st_size)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / unpacked_name(path).name
        try:
            with pa.OSFile(str(path)) as file, pa.CompressedInputStream(file, codec) as stream, plain.open("wb") as copy:
                while block := stream.read(_BLOCK_BYTES):
                    if copy.tell() + len(block) > most:
                        raise DataError(
                            f"the file unpacks to more than {MAX_GROWTH} times its size",
                            place=source.path,
                            fix="unpack it yourself if you trust it, and name the unpacked file",
                        )
                    copy.write(block)
        except OSError as error:
            reason = f"the file cannot be unpacked as {codec}: {_first_line(error)}"
            raise DataError(reason, place=source.path, fix="pack the file again, or name the unpacked one") from error
        try:
            yield plain
        except DataError as error:
            raise DataError(error.message, place=error.place.replace(str(plain), source.path), fix=error.fix) from error


def _chunks(
    path: Path, source: DataSource, split: Split, layout: _Layout, *, columns: Columns, rows_digest: "hashlib._Hash"
) -> Iterator[Chunk]:
    if layout.format == "hub":
        records = _hashed(read_hub(source, resolve(source.path)), rows_digest)
    else:
        workers = num_workers()
        # A JSON array has no line structure to cut at, and the first max_rows rows need no second reader.
        can_cut = layout.format == "jsonl" and layout.unit == "line" and layout.encoding in UTF8 and source.max_rows is None
        if can_cut and workers > 1 and path.stat().st_size >= PARALLEL_FROM_BYTES:
            return read_chunks_in_parallel(path, columns, split=split, source=source.path, workers=workers)
        records = _file_records(path, layout, columns)
    return read_chunks(islice(records, source.max_rows), columns, split=split, source=source.path)


def _file_records(path: Path, layout: _Layout, columns: Columns) -> Iterator[Record]:
    if layout.format == "csv":
        return read_csv(path, delimiter=layout.delimiter, encoding=layout.encoding)
    if layout.format == "jsonl":
        return read_jsonl(path, answer_column=columns.original(columns.answer), encoding=layout.encoding)
    return read_parquet(path) if layout.format == "parquet" else read_arrow(path)


def _hashed(records: Iterator[Record], digest: "hashlib._Hash") -> Iterator[Record]:
    for record in records:
        digest.update(orjson.dumps(record.fields, default=str, option=orjson.OPT_SORT_KEYS) + b"\n")
        yield record


def _check_file(path: Path, source: DataSource) -> None:
    if reason := why_not_a_file(path):
        names = [file.name for file in path.parent.iterdir()] if reason == "no such file" and path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        fix = f"did you mean {path.parent / near[0]}?" if near else "paths are relative to the working directory"
        raise DataError(reason, place=source.path, fix=fix)
    if path.stat().st_size == 0:
        raise DataError("the file is empty", place=source.path, fix="add rows, or remove the source from the config")
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"the file cannot be opened: {error.strerror}", place=source.path, fix="check its permissions") from error


def preview(source: DataSource, limit: int) -> list[Fields]:
    """The first readable records of the files of a source with all their columns, at most `limit`; empty for a hub data set.

    `DataError` where a file is missing, empty or unreadable.
    """
    columns = Columns("question", "prompt", "answer")
    found: list[Fields] = []
    for shard in shards_of(source):
        if _format(shard) == "hub" or len(found) >= limit:
            break
        with unpacked(Path(resolve(shard.path)), shard) as path:
            records = _file_records(path, _layout(path, shard, columns), columns)
            # A file of broken lines only must not be read to its end.
            readable = (record.fields for record in islice(records, 10 * limit) if record.fields is not None)
            found += islice(readable, limit - len(found))
    return found


def read_csv(path: Path, *, delimiter: str = ",", encoding: str = "utf-8") -> Iterator[Record]:
    """Records of a file of cells with a header line. Cells may contain line breaks.

    `DataError`: no header, a column named twice, an archive, another encoding, a quote that is never closed.
    """
    with path.open("rb") as start:
        refuse_other_format(path, start)
    csv.field_size_limit(MAX_LINE_BYTES)
    with _open_text(path, encoding) as file, wrong_encoding(path, encoding):
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = next(reader, None)
        if header is None:
            raise DataError("the file is empty", place=str(path), fix="add a header line and rows")
        repeated = [name for name in header if header.count(name) > 1]
        if repeated:
            raise DataError(f"the header names column {repeated[0]!r} twice", place=f"{path}:1", fix="rename one of them")
        while True:
            first_line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise DataError(
                        "a quote is opened and never closed, so the rest of the file is one cell",
                        place=f"{path}:{first_line}",
                        fix="close the quote, or double it inside a quoted cell",
                    ) from error
                rule = "line_too_long" if "field limit" in str(error) else "unreadable_line"
                yield Record(first_line, None, (Fault(rule, str(error)),))
                continue
            if cells is None:
                return
            if cells:  # a blank line has no cells
                yield _record(first_line, header, cells)


def csv_encoding(path: Path) -> str:
    """That of the byte order mark; cp1252, which spreadsheets on Windows write, if no character of the file is UTF-8; else utf-8.

    A file with valid UTF-8 and single broken bytes stays UTF-8, and the rows with those bytes are refused.
    """
    marked = encoding_of(path)
    if marked != "utf-8":
        return marked
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        try:
            while block := file.read(_BLOCK_BYTES):
                decoder.decode(block)
            decoder.decode(b"", final=True)
            return "utf-8"
        except UnicodeDecodeError:
            file.seek(0)
            while block := file.read(_BLOCK_BYTES):
                if _UTF8_CHARACTER.search(block) or _NOT_CP1252.search(block):
                    return "utf-8"
    return "cp1252"


def csv_delimiter(path: Path, encoding: str, wanted: Sequence[str]) -> str:
    """The delimiter by which the header has most of the wanted columns, then most columns; `DataError` in another encoding."""
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

    def batches() -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH)

    return _table_records(path, batches(), "Parquet")


def read_arrow(path: Path) -> Iterator[Record]:
    """Records of an Arrow file (Feather) or an Arrow stream (save_to_disk); raises `DataError` as `read_parquet` does."""

    def batches() -> Iterator[pa.RecordBatch]:
        with pa.memory_map(str(path)) as file:
            if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
                reader = pa.ipc.open_file(file)
                found = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                file.seek(0)
                found = iter(pa.ipc.open_stream(file))
            for batch in found:
                # Arrow takes offsets from a damaged file on trust.
                batch.validate(full=True)
                yield from (batch.slice(start, _BATCH) for start in range(0, batch.num_rows, _BATCH))

    return _table_records(path, batches(), "Arrow")


def _table_records(path: Path, batches: Iterator[pa.RecordBatch], kind: str) -> Iterator[Record]:
    number = 0
    try:
        for batch in batches:
            for fields in batch.to_pylist():
                number += 1
                yield Record(number, fields)
    # A damaged page may also decode to text that is not UTF-8, or to a date that Python cannot represent.
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"the file cannot be read as {kind}: {_first_line(error)}",
            place=f"{path}, after row {number}",
            fix="write the file again, or set the source's format",
        ) from error


def read_hub(source: DataSource, path: str) -> Iterator[Record]:
    """Records of one split of a hub data set, or of a local folder in the hub's layout.

    `DataError` where the data set, its configuration or split is unknown or cannot be reached.
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
